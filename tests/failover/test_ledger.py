# SPDX-License-Identifier: Apache-2.0
"""The ledger of the load, which is read while the load writes it."""

from __future__ import annotations

from pathlib import Path

from tests.failover.ledger import Ack, Ledger


def test_a_line_that_is_being_written_does_not_count_yet(tmp_path: Path) -> None:
    file = tmp_path / "ledger"
    lines = "ready\nack g 0 5 7 1.0 2.25\nack g 0 6 7 3.0 4.5\n"
    acks = [Ack("g", 0, 5, 7, 1.0, 2.25), Ack("g", 0, 6, 7, 3.0, 4.5)]
    for size in range(len(lines) + 1):
        file.write_text(lines[:size])
        ledger = Ledger.read(file)
        assert ledger.acks == acks[: max(lines[:size].count("\n") - 1, 0)]
        assert ledger.is_ready is (size >= len("ready\n"))
