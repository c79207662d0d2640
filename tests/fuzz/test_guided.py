# SPDX-License-Identifier: Apache-2.0
"""The inputs that coverage-guided fuzzing has kept (`make fuzz`), each once through its target."""

from __future__ import annotations

import pytest

from tests.fuzz.targets import TARGETS, kept


@pytest.mark.parametrize("name", TARGETS)
def test_kept_inputs(name: str) -> None:
    target, seeds = TARGETS[name]
    inputs = [*seeds(), *kept(name)]
    assert len(inputs) > len(seeds()), "nothing is kept"
    for data in inputs:
        target(data)
