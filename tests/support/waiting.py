# SPDX-License-Identifier: Apache-2.0
"""Bounded waiting for what another process does."""

from __future__ import annotations

import time
from collections.abc import Callable

STEP_SECONDS = 0.02


def wait_until(condition: Callable[[], object], what: str, seconds: float = 20.0) -> None:
    """Returns as soon as `condition()` is true; fails with `what` after `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(STEP_SECONDS)
