# SPDX-License-Identifier: Apache-2.0
"""The time slice of the event loop's thread."""

from __future__ import annotations

import ctypes
import errno
import logging
import os
import platform
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kcoord.server import time_slice
from kcoord.server.time_slice import TIME_SLICE_MS, shorten_time_slice

SCHED_GETATTR = {"x86_64": 315, "aarch64": 275}
FIRST_RELEASE = (6, 12)
"""The first Linux with time slices for each thread."""
NICE = 3
UNKNOWN_CALL = 9_999


def in_a_thread() -> tuple[int, int]:
    """Returns the nice value of this thread and its time slice in ns, after it was shortened."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    shorten_time_slice()
    attributes = ctypes.create_string_buffer(48)
    number = ctypes.c_long(SCHED_GETATTR[platform.machine()])
    assert ctypes.CDLL(None).syscall(number, ctypes.c_int(0), attributes, ctypes.c_uint(48), ctypes.c_uint(0)) == 0
    _, policy, _, nice, _, slice_ns, _, _ = struct.unpack("<IIQiIQQQ", attributes.raw)
    assert policy == os.SCHED_OTHER
    return nice, slice_ns


def test_the_slice_of_a_thread_is_shortened_and_its_nice_value_stays() -> None:
    with ThreadPoolExecutor(1) as threads:
        nice, slice_ns = threads.submit(in_a_thread).result()
    assert nice == NICE
    release = tuple(int(part) for part in platform.release().split(".")[:2])
    assert slice_ns == (TIME_SLICE_MS * 1_000_000 if release >= FIRST_RELEASE else 0)


def test_a_real_time_priority_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getscheduler", lambda process: os.SCHED_FIFO)
    monkeypatch.setattr(ctypes, "CDLL", lambda *arguments, **options: pytest.fail("the policy is set"))
    shorten_time_slice()


def test_a_slice_that_cannot_be_set_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(time_slice._CALL_NUMBERS, platform.machine(), UNKNOWN_CALL)
    with caplog.at_level(logging.INFO):
        shorten_time_slice()
    assert "The time slice of the event loop stays as it is: Function not implemented" in caplog.text


def test_a_sandbox_that_forbids_to_ask_for_the_policy_does_not_end_the_start(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def forbidden(process: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "sched_getscheduler", forbidden)
    with caplog.at_level(logging.INFO):
        shorten_time_slice()
    assert "stays as it is: Function not implemented" in caplog.text
