# SPDX-License-Identifier: Apache-2.0
"""The exhaustive check of two instances and one shard: small graphs as a whole, and faults that it has to find."""

from __future__ import annotations

import pytest

from kcoord.cli.model_check import main
from kcoord.runtime.upstream_log import UpstreamLog
from kcoord.simulation.model_check.takeover import TakeoverBudget
from kcoord.simulation.model_check.takeover_search import TakeoverSearch
from kcoord.simulation.planted_upstream import EarlyAnswer, NewSequence, NoClaim, UnreadStandby, UnreadTail

BUDGETS = [
    TakeoverBudget(claims=3, puts=1, losses=0, late=0, crashes=0),
    TakeoverBudget(claims=2, puts=1, losses=1, late=0, crashes=0),
    TakeoverBudget(claims=2, puts=1, losses=0, late=1, crashes=0),
    TakeoverBudget(claims=2, puts=1, losses=0, late=0, crashes=1),
]
FOREVER_MS = 1 << 60


@pytest.mark.parametrize("budget", BUDGETS, ids=str)
def test_every_property_holds_in_the_whole_graph(budget: TakeoverBudget) -> None:
    report = TakeoverSearch(budget).run()
    assert not report.violation, (report.violation, report.trace)
    assert report.states > 1_000
    assert report.served > 100
    expected = {"claim", "put", "follow", "deliver InitProducerId", "deliver Produce", "deliver Fetch"}
    assert expected <= report.actions.keys()


@pytest.mark.parametrize(
    ("fault", "broken"),
    [
        (NoClaim, "OnlyTheOwnerAcknowledges"),
        (EarlyAnswer, "AcknowledgedIsInTheLog"),
        (NewSequence, "NoDuplicate"),
        (UnreadStandby, "OwnerIsTheLog"),
    ],
)
def test_a_planted_fault_is_reported_with_the_steps_to_it(fault: type[UpstreamLog], broken: str) -> None:
    def make_log() -> UpstreamLog:
        return fault("instance", write_timeout_ms=FOREVER_MS, foreign_id_wait_ms=FOREVER_MS, renew_after_ms=FOREVER_MS)

    report = TakeoverSearch(BUDGETS[1], make_log).run()
    assert report.broken == broken, report.violation
    assert report.trace


def test_a_takeover_that_does_not_read_up_to_its_claim_is_reported() -> None:
    report = TakeoverSearch(BUDGETS[0], make_reader=lambda: UnreadTail(0)).run()
    assert report.broken == "OwnerIsTheLog", report.violation


def test_the_command_has_the_option(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kcoord.cli.model_check.TAKEOVER_BUDGETS", BUDGETS[:1])
    assert main(["--upstream"]) == 0
    assert "every property holds" in capsys.readouterr().out
    assert main(["--upstream", "--json"]) == 0
    assert '"violation": ""' in capsys.readouterr().out
