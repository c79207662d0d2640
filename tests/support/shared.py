# SPDX-License-Identifier: Apache-2.0
"""Recorded facts about Kafka that lie beside the checkout (KCOORD_SHARED, else ../shared)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("KCOORD_SHARED", ROOT.parent / "shared"))


def shared(*parts: str) -> Path:
    """A path under the folder; where it is not there the test is skipped, or fails in CI."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        missing(f"{path} is not there")
    return path


def missing(reason: str) -> NoReturn:
    """Skips the test, or fails it where KCOORD_REQUIRE_ALL says that nothing may be missing (as CI does)."""
    if os.environ.get("KCOORD_REQUIRE_ALL"):
        pytest.fail(reason)
    pytest.skip(reason)
