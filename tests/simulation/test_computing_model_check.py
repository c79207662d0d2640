# SPDX-License-Identifier: Apache-2.0
"""The exhaustive check of groups whose members compute target assignments, up to a small bound.

`make model-check ARGS=--client-assignors` explores larger graphs.
"""

from __future__ import annotations

import json

import pytest

from kcoord.cli.model_check import COMPUTING_CONFIGURATIONS, main
from kcoord.simulation import planted_assignors
from kcoord.simulation.model_check.model import Budget, ModelAssignor
from kcoord.simulation.model_check.search import Configuration, Report, Search
from kcoord.simulation.planted import FAULTS

GOOD, BAD, NONE = ModelAssignor.GOOD, ModelAssignor.BAD, ModelAssignor.NONE

BOTH_MAY_LEAVE = Configuration(2, 2, Budget(2, 1, 0, 0, 0, 0), 6_000, assignors=(GOOD, GOOD))
ONE_FAILS = Configuration(1, 2, Budget(1, 0, 0, 0, 0, 0, failures=1), assignors=(GOOD,))
ONE_IS_BAD = Configuration(2, 2, Budget(2, 1, 0, 0, 0, 0), 6_000, assignors=(GOOD, BAD))
WITH_LOSSES = Configuration(2, 2, Budget(2, 0, 0, 1, 0, 0), 6_000, assignors=(GOOD, GOOD))

FOUND_BY = {
    "assignment-checked-by-the-present": (ONE_IS_BAD, "ValidInstall"),
    "assignment-of-a-member-not-asked": (BOTH_MAY_LEAVE, "ValidInstall"),
    "assignment-of-another-epoch": (WITH_LOSSES, "ValidInstall"),
    "computation-of-a-dead-member": (BOTH_MAY_LEAVE, "ComputingMember"),
    "computation-without-deadline": (ONE_IS_BAD, "EventuallyConverges"),
    "failed-members-are-never-asked-again": (ONE_FAILS, "EventuallyConverges"),
    "targets-of-members-that-left": (ONE_IS_BAD, "LegalTargetAssignment"),
}


def search(configuration: Configuration) -> Report:
    report = Search(configuration).run()
    assert not report.violation, (report.violation, report.trace)
    return report


def test_a_small_graph_is_explored_completely() -> None:
    budget = Budget(2, 0, 0, 0, 0, 0, failovers=1, failures=1)
    report = search(Configuration(2, 2, budget, assignors=(GOOD, NONE)))
    assert report.is_complete
    assert report.converged > 0


def test_symmetry_counts_states_that_differ_only_by_member_ids_once() -> None:
    budget = Budget(2, 0, 0, 0, 0, 0)
    every = search(Configuration(2, 2, budget, symmetric=False, assignors=(GOOD, GOOD)))
    symmetric = search(Configuration(2, 2, budget, assignors=(GOOD, GOOD)))
    assert every.is_complete and symmetric.is_complete
    assert symmetric.states < every.states <= 2 * symmetric.states


def test_every_property_holds_and_every_event_happens() -> None:
    reports = [
        search(Configuration(c.clients, c.partitions, c.budget, 2_000, assignors=c.assignors))
        for c in COMPUTING_CONFIGURATIONS
    ]
    assert all(report.states >= 2_000 for report in reports)
    assert set().union(*(report.actions for report in reports)) >= {
        *("prepare", "prepare-again", "install-valid", "install-invalid", "install-failed"),
        *(
            "begin-install",
            "begin-install-again",
            "end-install",
            "end-install-again",
            "deadline",
            "pause-over",
            "failover",
        ),
    }


@pytest.mark.parametrize("name", FOUND_BY)
def test_a_planted_fault_is_reported_with_the_steps_to_it(name: str) -> None:
    configuration, broken = FOUND_BY[name]
    with FAULTS[name].planted():
        report = Search(configuration).run()
    assert report.broken == broken, report.violation
    assert report.trace


def test_every_planted_fault_of_client_side_assignors_is_tested() -> None:
    assert FOUND_BY.keys() == planted_assignors.PATCHES.keys()


def test_the_command_searches_groups_whose_members_compute(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--client-assignors", "--states", "1000"]) == 0
    text = capsys.readouterr().out
    assert "2 clients, assignor good, assignor good, 2 partitions, joins=2 leaves=1 failovers=1 failures=1" in text
    assert main(["--client-assignors", "--states", "1000", "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [report["violation"] for report in reports] == [""] * len(COMPUTING_CONFIGURATIONS)
