# SPDX-License-Identifier: Apache-2.0
"""A wall clock that tests set under a running process, with libfaketime (Debian's package of that name)."""

from __future__ import annotations

from pathlib import Path

from tests.support.shared import missing

_FOLDERS = ("/usr/lib", "/usr/local/lib", "/usr/lib64")


class WallClock:
    """Its `environment` makes a process see it; the monotonic clock stays as it is, as when a clock is set."""

    def __init__(self, file: Path) -> None:
        library = next(
            (str(found) for folder in _FOLDERS for found in Path(folder).glob("**/faketime/libfaketimeMT.so.1")), None
        )
        if library is None:
            missing("libfaketime is not installed")
        self._file = file
        self.environment = {
            "LD_PRELOAD": library,
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            # Without it waits of threads for one another, by the monotonic clock, take milliseconds.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }
        self.set_ahead(0)

    def set_ahead(self, hours: float) -> None:
        """How far the clock is before the true time; below zero, behind it. It is seen within a second."""
        self._file.write_text(f"{round(hours * 3600):+d}\n")
