# SPDX-License-Identifier: Apache-2.0
"""What the fuzzers start from: recorded requests of real clients, and requests that once did harm."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "inputs"


def recorded() -> list[bytes]:
    """Frames without their length, as `tests.fuzz.record` found them."""
    return _read("requests.txt")


def findings() -> list[bytes]:
    """Frames that the fuzzers found something with; what it was stands above each line."""
    return _read("findings.txt")


@cache
def _read(name: str) -> list[bytes]:
    lines = (_FOLDER / name).read_text().splitlines()
    return [bytes.fromhex(line) for line in lines if line and not line.startswith("#")]
