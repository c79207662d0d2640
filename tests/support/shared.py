# SPDX-License-Identifier: Apache-2.0
"""Recorded facts about Kafka, in a folder beside the checkout (KCOORD_SHARED, by default ../shared)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

import pytest

ROOT = Path(__file__).parents[2]
SHARED = Path(os.environ.get("KCOORD_SHARED", ROOT.parent / "shared"))


def shared(*parts: str) -> Path:
    """Returns a path in this folder. If it does not exist, the test is skipped, or fails in CI."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        missing(f"{path} does not exist")
    return path


def missing(reason: str) -> NoReturn:
    """Skips the test. If KCOORD_REQUIRE_ALL is set, as in CI, the test fails instead."""
    if os.environ.get("KCOORD_REQUIRE_ALL"):
        pytest.fail(reason)
    pytest.skip(reason)
