# SPDX-License-Identifier: Apache-2.0
"""The memory of a process, as Linux counts it."""

from __future__ import annotations

from pathlib import Path


def resident_kib(pid: int, field: str = "VmRSS") -> int:
    """Returns the resident memory now. With the field VmHWM: the most so far."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith(f"{field}:")).split()[1])
