# SPDX-License-Identifier: Apache-2.0
"""Counts function calls: the cost of an operation that does not depend on the machine or on other work on it."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from types import FrameType


def count_calls(work: Callable[[], object]) -> int:
    """Returns how many functions the work calls, those of Python and those in C.

    The collector is off meanwhile, because it would finalize garbage of other tests.
    """
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        if event in ("call", "c_call"):
            count += 1

    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count
