# SPDX-License-Identifier: Apache-2.0
"""Runs each input that coverage-guided fuzzing has kept (`make fuzz`) once through its target."""

from __future__ import annotations

import pytest

from tests.fuzz.targets import TARGETS, kept


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs(name: str) -> None:
    target, seeds = TARGETS[name]
    inputs = [*seeds(), *kept(name)]
    assert len(inputs) > len(seeds()), "there are no kept inputs"
    for data in inputs:
        target(data)
