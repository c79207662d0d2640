# SPDX-License-Identifier: Apache-2.0
"""A wall clock that tests can set for a running process, with libfaketime (Debian's package libfaketime)."""

from __future__ import annotations

from pathlib import Path

from tests.support.shared import missing

_FOLDERS = ("/usr/lib", "/usr/local/lib", "/usr/lib64")


class WallClock:
    """A settable wall clock for processes with its `environment`. The monotonic clock does not change."""

    def __init__(self, file: Path) -> None:
        library = next(
            (str(path) for folder in _FOLDERS for path in Path(folder).glob("**/faketime/libfaketimeMT.so.1")), None
        )
        if library is None:
            missing("libfaketime is not installed")
        self._file = file
        self.environment = {
            "LD_PRELOAD": library,
            "FAKETIME_TIMESTAMP_FILE": str(file),
            "FAKETIME_CACHE_DURATION": "1",
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
            # Without this, waits between threads, which use the monotonic clock, take milliseconds longer.
            "FAKETIME_FORCE_MONOTONIC_FIX": "0",
        }
        self.set_ahead(0)

    def set_ahead(self, hours: float) -> None:
        """Sets the clock this far ahead of the true time, or behind it if negative. Takes effect within a second."""
        self._file.write_text(f"{round(hours * 3600):+d}\n")
