# SPDX-License-Identifier: Apache-2.0
"""How much freed memory the C library keeps for the next requests."""

from __future__ import annotations

from typing import Final

KEPT_BYTES: Final = 4 << 20
"""Several large reads with the copies of their frames and batches."""


def keep_freed_memory() -> None:
    """Makes glibc keep up to KEPT_BYTES of freed memory at the end of the heap.

    A read of a connection, with its frames, takes more than the 128 KiB that glibc keeps at the start. If glibc gave
    them back to the kernel after each read, the next read would fault for every page. glibc keeps twice the size of the
    largest block that was mapped and freed (mallopt(3), M_MMAP_THRESHOLD). Only the first page of this block is used.
    """
    bytes(KEPT_BYTES // 2)
