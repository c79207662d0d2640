# SPDX-License-Identifier: Apache-2.0
"""Signals that stop a command cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from kcoord.cli import main
from kcoord.cli.stopping import end_at_once_on_interrupt, stop_on_signals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_sets_the_event_and_restores_the_handlers(number: signal.Signals) -> None:
    heard: list[int] = []
    before = signal.signal(number, lambda received, frame: heard.append(received))
    try:
        with stop_on_signals() as stop:
            assert not stop.is_set()
            os.kill(os.getpid(), number)
            assert stop.wait(10)
            assert heard == []
            os.kill(os.getpid(), number)
        assert heard == [number]
        os.kill(os.getpid(), number)
        assert heard == [number, number]
    finally:
        signal.signal(number, before)


def test_without_a_signal_the_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with stop_on_signals() as stop:
        assert not stop.wait(0)
    assert signal.getsignal(signal.SIGTERM) is before


def test_ctrl_c_ends_a_command_with_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(options: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("kcoord.cli.log._verify", interrupted)
    assert main(["log", "verify", "/"]) == 130


_BUSY = """
import os, signal, threading, time
from kcoord.cli.stopping import end_at_once_on_interrupt

signal.signal(signal.SIGINT, signal.default_int_handler)  # the tests may run in the background of a shell
threading.Thread(target=time.sleep, args=(600,)).start()
print("begun")
with end_at_once_on_interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(600)
"""


def test_an_interrupt_ends_a_command_at_once_whatever_its_threads_do() -> None:
    done = subprocess.run([sys.executable, "-c", _BUSY], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "begun\n", "")


def test_an_ignored_interrupt_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with end_at_once_on_interrupt():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_after_a_command_an_interrupt_is_an_exception_again() -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with end_at_once_on_interrupt():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
