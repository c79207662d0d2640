# SPDX-License-Identifier: Apache-2.0
"""The first seeds: all invariants hold, and the runs reach every error branch of the coordinators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.cli.simulate import main
from kcoord.server.api.authorization_table import CHECKS
from kcoord.simulation.reached import Reached
from kcoord.simulation.rights_checks import ANSWERS
from kcoord.simulation.runner import Outcome, report, run
from kcoord.simulation.world import Setup
from kcoord_protocol.errors import Errors

SEEDS = range(100)
SECURITY_SEEDS = range(4)
ASSIGNOR_SEEDS = range(12)
UPSTREAM_SEEDS = (*range(6, 11), 25)
REPOSITORY = Path(__file__).parents[2]


class Runs:
    """The outcomes so far. `reached` counts the error branches of all runs."""

    def __init__(self, reached: Reached) -> None:
        self.reached = reached
        self._outcomes: dict[tuple[int, str], Outcome] = {}

    def of(self, seed: int, scenario: str = "") -> Outcome:
        key = seed, scenario
        if key not in self._outcomes:
            self._outcomes[key] = run(Setup(seed, scenario=scenario))
        return self._outcomes[key]

    def every(self) -> list[Outcome]:
        """Returns the outcomes of all seeds, with fixed dialogues, ACLs, assignors, and an upstream."""
        security = [self.of(seed, "security") for seed in SECURITY_SEEDS]
        assignors = [self.of(seed, "client-assignors") for seed in ASSIGNOR_SEEDS]
        upstream = [self.of(seed, "upstream") for seed in UPSTREAM_SEEDS]
        return [*(self.of(seed) for seed in SEEDS), self.of(0, "corners"), *security, *assignors, *upstream]


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    with Reached() as reached:
        yield Runs(reached)


@pytest.mark.parametrize("seed", SEEDS)
def test_no_invariant_is_violated(runs: Runs, seed: int) -> None:
    outcome = runs.of(seed)
    assert not outcome.failure, report(outcome)
    assert outcome.settled_after_ms >= 0


@pytest.mark.parametrize("seed", SECURITY_SEEDS)
def test_rights_follow_the_acls(runs: Runs, seed: int) -> None:
    outcome = runs.of(seed, "security")
    assert not outcome.failure, report(outcome)


@pytest.mark.parametrize("seed", ASSIGNOR_SEEDS)
def test_client_side_assignors_compute(runs: Runs, seed: int) -> None:
    outcome = runs.of(seed, "client-assignors")
    assert not outcome.failure, report(outcome)


def test_assignments_of_clients_are_installed_and_refused(runs: Runs) -> None:
    counts: Counter[str] = sum((runs.of(seed, "client-assignors").counts for seed in ASSIGNOR_SEEDS), Counter())
    refused = (Errors.INVALID_ASSIGNMENT, Errors.UNKNOWN_MEMBER_ID, Errors.STALE_MEMBER_EPOCH)
    expected = {"installed", "assignor-unsupported", *(f"computation: {error.name}" for error in refused)}
    assert {kind for kind in expected if not counts[kind]} == set()


def test_guests_are_denied_in_every_way(runs: Runs) -> None:
    counts: Counter[str] = sum((runs.of(seed, "security").counts for seed in SECURITY_SEEDS), Counter())
    expected = {
        f"denied {api_key.name} {check.error.name}"
        for api_key in ANSWERS
        for check in CHECKS[api_key]
        if check.error is not None
    }
    # Guests produce no transactional batches.
    expected.remove("denied PRODUCE TRANSACTIONAL_ID_AUTHORIZATION_FAILED")
    assert {kind for kind in (*expected, "acls-changed", "quotas-changed", "throttled") if not counts[kind]} == set()


def test_every_error_branch_is_reached(runs: Runs) -> None:
    runs.every()
    assert not runs.reached.never(), "\n".join(runs.reached.lines())


def test_every_transition_is_seen(runs: Runs) -> None:
    transitions: Counter[str] = sum((outcome.transitions for outcome in runs.every()), Counter())
    classic = [
        ("Empty", "PreparingRebalance"),
        ("PreparingRebalance", "CompletingRebalance"),
        ("PreparingRebalance", "Empty"),
        ("CompletingRebalance", "Stable"),
        ("CompletingRebalance", "PreparingRebalance"),
        ("Stable", "PreparingRebalance"),
    ]
    consumer = [
        ("Empty", "Stable"),
        ("Stable", "Empty"),
        ("Stable", "Assigning"),
        ("Stable", "Reconciling"),
        ("Assigning", "Reconciling"),
        ("Assigning", "Stable"),
        ("Reconciling", "Assigning"),
        ("Reconciling", "Stable"),
        ("Reconciling", "Empty"),
    ]
    transaction = [
        *(("new", "Empty"), ("Empty", "Empty"), ("Empty", "Ongoing"), ("Empty", "PrepareAbort")),
        *(("Ongoing", "PrepareCommit"), ("Ongoing", "PrepareAbort")),
        *(("PrepareCommit", "CompleteCommit"), ("PrepareAbort", "CompleteAbort")),
        *(("CompleteCommit", "Ongoing"), ("CompleteCommit", "Empty")),
        *(("CompleteAbort", "Ongoing"), ("CompleteAbort", "Empty")),
    ]
    expected = {f"group: classic {old} -> classic {new}" for old, new in classic}
    expected |= {f"group: consumer {old} -> consumer {new}" for old, new in consumer}
    expected |= {f"transaction: {old} -> {new}" for old, new in transaction}
    expected |= {"transaction: forgotten", "group: classic Stable -> none"}
    assert {name for name in expected if not transitions[name]} == set()
    assert any("classic Stable -> consumer" in name for name in transitions)
    assert any("consumer Stable -> classic" in name for name in transitions)


def test_the_seeds_meet_every_kind_of_fault(runs: Runs) -> None:
    counts: Counter[str] = sum((runs.of(seed).counts for seed in SEEDS), Counter())
    expected = {
        *("crash", "stop", "broker-pause", "give-up-shard", "worker-loss", "disk-error", "failed", "load"),
        *("drop", "drop-response", "duplicate", "hold-up", "cut-off", "reset-all", "slow-link", "slow-reader"),
        "start-slow-clock",
        *("clean", "snapshot", "snapshot-too-old", "snapshot-failed", "expired", "converted", "lull", "metadata"),
        *("member-crash", "member-leave", "member-pause", "subscribe", "freeze", "fenced", "unreleased"),
        *("commit-refused", "group-full", "give-up", "task", "markers", "steady", "producer-forgets"),
        *("transaction-committed", "transaction-aborted", "delete-group", "delete-offsets"),
    }
    assert {kind for kind in expected if not counts[kind]} == set()


def test_a_seed_is_one_run(runs: Runs) -> None:
    for seed in (3, 7):
        assert run(Setup(seed)).trace_hash == runs.of(seed).trace_hash
    assert len({runs.of(seed).trace_hash for seed in range(4)}) == 4


def test_a_run_does_not_depend_on_the_order_of_sets(runs: Runs) -> None:
    """Another process has other string hashes, and so iterates over sets in another order."""
    hash_seed = "1" if os.environ.get("PYTHONHASHSEED") != "1" else "2"
    run = subprocess.run(
        [sys.executable, "-m", "kcoord", "simulate", "--seed", "5"],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert f"trace hash: {runs.of(5).trace_hash}" in run.stdout


def test_the_command_counts_and_exits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "0:2", "--steps", "200"]) == 0
    assert capsys.readouterr().out.endswith("2 passed, 0 failed\n")
    assert main(["--seed", "0", "--plant", "reply-before-durable"]) == 1
    output = capsys.readouterr().out
    assert "again: kcoord simulate --seed 0" in output
    assert "trace hash: " in output
    assert main(["--seed", "0", "--plant", "reply-before-durable", "--json"]) == 1
    said = json.loads(capsys.readouterr().out)
    assert f"trace hash: {said['trace_hash']}" in output
    (failure,) = said["failures"]
    assert (failure["seed"], said["runs"]) == (0, 1)
    assert main(["--seeds", "0:2", "--steps", "200", "--assignor", "uniform-rack", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["failures"] == []
    for wrong in (
        ["--seeds", "many"],
        ["--faults", "weather"],
        ["--assignor", "sticky"],
        ["--assignor", "nowhere:Class"],
    ):
        with pytest.raises(SystemExit):
            main(wrong)
