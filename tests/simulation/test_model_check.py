# SPDX-License-Identifier: Apache-2.0
"""The exhaustive check up to a small bound. `make model-check` explores a million states."""

from __future__ import annotations

import json

import pytest

from kcoord.cli.model_check import CONFIGURATIONS, main
from kcoord.coordinator.group.consumer.assignment import CurrentAssignmentBuilder
from kcoord.simulation.model_check.model import Budget
from kcoord.simulation.model_check.search import Configuration, Report, Search
from kcoord.simulation.planted import FAULTS


def search(configuration: Configuration) -> Report:
    return Search(configuration).run()


def test_a_small_graph_is_explored_completely() -> None:
    report = search(Configuration(2, 2, Budget(2, 0, 0, 0, 0, 0)))
    assert report.is_complete
    assert (report.violation, report.converged > 0) == ("", True)


def test_symmetry_counts_states_that_differ_only_by_member_ids_once() -> None:
    budget = Budget(2, 0, 0, 0, 0, 0)
    every = search(Configuration(2, 2, budget, symmetric=False))
    symmetric = search(Configuration(2, 2, budget))
    assert every.is_complete and symmetric.is_complete
    assert symmetric.states < every.states <= 2 * symmetric.states


@pytest.mark.parametrize("configuration", CONFIGURATIONS, ids=str)
def test_every_property_holds(configuration: Configuration) -> None:
    report = search(Configuration(configuration.clients, configuration.partitions, configuration.budget, 20_000))
    assert not report.violation, (report.violation, report.trace)
    assert report.states >= 20_000


@pytest.mark.parametrize(
    ("name", "broken"),
    [
        ("grant-before-release", {"ValidPartitionEpoch", "NoDoubleClientAssignment"}),
        ("epoch-not-bumped", {"LegalTargetAssignment", "EventuallyConverges"}),
    ],
)
def test_a_planted_fault_is_reported_with_the_steps_to_it(name: str, broken: set[str]) -> None:
    with FAULTS[name].planted():
        report = search(Configuration(2, 2, Budget(3, 1, 1, 0, 1, 0), 20_000))
    assert report.broken in broken, report.violation
    assert report.trace
    assert CurrentAssignmentBuilder._next.__module__.startswith("kcoord.coordinator")


def test_the_command_prints_the_number_of_states(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--states", "2000"]) == 0
    text = capsys.readouterr().out
    assert "every property holds" in text
    assert main(["--states", "2000", "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [report["violation"] for report in reports] == [""] * len(CONFIGURATIONS)
    assert text.endswith(f"{sum(report['states'] for report in reports)} states explored\n")
