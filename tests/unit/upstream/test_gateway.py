# SPDX-License-Identifier: Apache-2.0
"""How often a gateway that cannot look at the upstream says so."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from kcoord.metadata.upstream import UpstreamSnapshot
from kcoord_protocol.errors import Errors, KafkaError
from tests.unit.upstream.harness import stage


async def test_a_failure_to_look_is_logged_when_it_changes(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lost, closed = KafkaError(Errors.NETWORK_EXCEPTION, "no connection"), KafkaError(Errors.REQUEST_TIMED_OUT, "late")
    outcomes = iter([lost, lost, closed, None, closed])

    async def look(topic_ids: Mapping[str, bytes]) -> UpstreamSnapshot:
        outcome = next(outcomes)
        if outcome is not None:
            raise outcome
        return UpstreamSnapshot([], [], set())

    async with stage() as on_stage:
        monkeypatch.setattr(on_stage.upstream, "look", look, raising=False)
        for _ in range(5):
            await on_stage.gateway.look()
    said = [record.getMessage() for record in caplog.records if record.name == "kcoord.upstream.gateway"]
    assert said == [f"The upstream cannot be looked at: {error}" for error in (lost, closed, closed)]
