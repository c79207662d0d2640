# SPDX-License-Identifier: Apache-2.0
"""How long a shard refuses what would have to be written after a write found no space: a second, then two, four and
eight. The first success ends that.
"""

from __future__ import annotations

import errno
from typing import Final

_NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)
_FIRST_MS: Final = 1000
_LONGEST_MS: Final = 8000


class DiskSpace:
    """Hears how each write ended; the disk counts as full until `full_until_ms`."""

    __slots__ = ("_refuse_ms", "full_until_ms")

    def __init__(self) -> None:
        self.full_until_ms = 0
        self._refuse_ms = 0

    def written(self, error: OSError | None, now_ms: int) -> None:
        if error is None:
            self._refuse_ms = 0
        elif error.errno in _NO_SPACE:
            self._refuse_ms = min(max(2 * self._refuse_ms, _FIRST_MS), _LONGEST_MS)
            self.full_until_ms = now_ms + self._refuse_ms
