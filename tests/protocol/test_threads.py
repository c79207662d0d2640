# SPDX-License-Identifier: Apache-2.0
"""Message classes that several threads make at the same time, as in a process with a client and a broker."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

import kcoord_protocol.messages as messages
from kcoord_protocol.schema import load_schema

THREADS = 4


def test_all_threads_get_the_same_class(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thread waits until all threads have seen that the class does not exist yet."""
    monkeypatch.setattr(messages, "_classes", {})
    monkeypatch.setattr(messages, "globals", dict, raising=False)
    all_here = Barrier(THREADS, timeout=10)

    def load_together(name: str) -> object:
        all_here.wait()
        return load_schema(name)

    monkeypatch.setattr(messages, "load_schema", load_together)
    with ThreadPoolExecutor(THREADS) as threads:
        made = set(threads.map(messages.message_class, ["OffsetCommitKey"] * THREADS))
    assert len(made) == 1
