# SPDX-License-Identifier: Apache-2.0
"""The seeds of the fuzzers: recorded requests of real clients, and requests that once caused a fault."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "inputs"


def recorded() -> list[bytes]:
    """Returns the frames that `tests.fuzz.record` recorded, without their length prefix."""
    return _read("requests.txt")


def findings() -> list[bytes]:
    """Returns frames that revealed a fault. In the file, a comment above each line describes the fault."""
    return _read("findings.txt")


@cache
def _read(name: str) -> list[bytes]:
    lines = (_FOLDER / name).read_text().splitlines()
    return [bytes.fromhex(line) for line in lines if line and not line.startswith("#")]
