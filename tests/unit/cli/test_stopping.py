# SPDX-License-Identifier: Apache-2.0
"""Signals that stop a command cleanly."""

from __future__ import annotations

import os
import signal

import pytest

from kcoord.cli import main
from kcoord.cli.stopping import stop_on_signals


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
