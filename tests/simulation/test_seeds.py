# SPDX-License-Identifier: Apache-2.0
"""Seeds that must hold all invariants, and the conditions under which that means something."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from kcoord.simulation.planted import FAULTS
from kcoord.simulation.runner import Outcome, main, report, run_seed

SEEDS = range(24)
SEEDS_PER_FAULT = 12
REPOSITORY = Path(__file__).parents[2]


@cache
def outcome_of(seed: int) -> Outcome:
    return run_seed(seed)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_invariant_is_violated(seed: int) -> None:
    outcome = outcome_of(seed)
    assert not outcome.failure, report(outcome)
    assert outcome.settled_after_ms >= 0


def test_the_seeds_reach_the_rare_cases() -> None:
    counts: Counter[str] = sum((outcome_of(seed).counts for seed in SEEDS), Counter())
    wanted = {
        *("crash", "load", "disk-error", "failed", "drop", "drop-response", "duplicate", "topics", "task", "revoke"),
        *("leave", "pause", "subscribe", "freeze", "fenced", "unreleased", "commit-refused"),
    }
    assert {kind for kind in wanted if counts[kind] < 2} == set()


def test_a_seed_is_one_run() -> None:
    for seed in (3, 7):
        assert run_seed(seed).trace_hash == outcome_of(seed).trace_hash
    assert len({outcome_of(seed).trace_hash for seed in range(4)}) == 4


def test_a_run_does_not_depend_on_the_order_of_sets() -> None:
    """Another process has other string hashes, and so another order wherever a set is iterated over."""
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    run = subprocess.run(
        [sys.executable, "-m", "kcoord.simulation", "--seed", "5"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert f"trace hash: {outcome_of(5).trace_hash}" in run.stdout


@pytest.mark.parametrize(
    ("name", "invariant"),
    [
        ("reply-before-durable", "I-11 no acknowledged commit is lost"),
        ("skip-a-replay", "I-11 no acknowledged commit is lost"),
        ("grant-before-revocation", "I-1 one owner"),
    ],
)
def test_a_planted_fault_is_found(name: str, invariant: str) -> None:
    for seed in range(SEEDS_PER_FAULT):
        outcome = run_seed(seed, FAULTS[name])
        if outcome.invariant == invariant:
            assert f"--seed {seed}" in report(outcome)
            return
    pytest.fail(f"{SEEDS_PER_FAULT} seeds did not find it")


def test_every_fault_that_can_be_planted_is_tested() -> None:
    assert set(FAULTS) == {"reply-before-durable", "skip-a-replay", "grant-before-revocation"}


def test_the_command_counts_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:2"]) == 0
    assert capsys.readouterr().out.endswith("2 passed, 0 failed\n")
    assert main(["--seed", "0", "--plant", "grant-before-revocation"]) in (0, 1)
    with pytest.raises(SystemExit):
        main(["--seeds", "many"])
