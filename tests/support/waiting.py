# SPDX-License-Identifier: Apache-2.0
"""Bounded waiting for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

STEP_SECONDS = 0.02
_T = TypeVar("_T")


def wait_until(condition: Callable[[], _T], what: str, seconds: float = 20.0) -> _T:
    """Polls `condition()` and returns its first true result. Fails with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(STEP_SECONDS)
    return result
