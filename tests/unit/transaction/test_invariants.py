# SPDX-License-Identifier: Apache-2.0
"""Breaks each named invariant of the transaction coordinator (docs/contributing/invariants.md), sees its assertion."""

from __future__ import annotations

from dataclasses import replace

import pytest

from kcoord.coordinator.transaction import shard as transaction_shard
from kcoord.coordinator.transaction.end_transaction import EndRequest
from kcoord.coordinator.transaction.metadata import TransactionMetadata, TransactionState
from tests.unit.transaction.coordinator import Coordinator


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("T-1", {"state": TransactionState.COMPLETE_COMMIT}),
        ("T-2", {"state": TransactionState.PREPARE_COMMIT, "producer_epoch": 0}),
        ("T-3", {"state": TransactionState.PREPARE_COMMIT, "producer_id": 5}),
        ("T-4", {"state": TransactionState.PREPARE_COMMIT, "partitions": {}}),
    ],
)
def test_an_illegal_change_of_a_transaction_is_not_written(
    monkeypatch: pytest.MonkeyPatch, name: str, changes: dict[str, object]
) -> None:
    coordinator = Coordinator()
    coordinator.initialized()
    producer = coordinator.initialized()
    coordinator.add(producer, ("foo", 0))

    def decide(metadata: TransactionMetadata, request: EndRequest, now_ms: int) -> TransactionMetadata:
        return replace(metadata, **changes)  # type: ignore[arg-type]

    monkeypatch.setattr(transaction_shard, "decide_end", decide)
    with pytest.raises(AssertionError, match=f"{name}: "):
        coordinator.end(producer)
    assert coordinator.state is TransactionState.ONGOING
