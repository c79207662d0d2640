# SPDX-License-Identifier: Apache-2.0
"""Every request in every state, with the responses of Kafka 4.3.1 to the same dialogues."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kcoord.coordinator.transaction.metadata import (
    EXHAUSTED_EPOCH,
    LEGAL_PREDECESSORS,
    NO_PRODUCER_EPOCH,
    TransactionMetadata,
    TransactionState,
)
from kcoord.runtime.result import Producer
from kcoord_protocol.errors import Errors
from tests.unit.transaction.coordinator import Coordinator, error_of

EMPTY, ONGOING = TransactionState.EMPTY, TransactionState.ONGOING
PREPARE_COMMIT, PREPARE_ABORT = TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT
COMPLETE_COMMIT, COMPLETE_ABORT = TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT
STATES = (EMPTY, ONGOING, PREPARE_COMMIT, PREPARE_ABORT, COMPLETE_COMMIT, COMPLETE_ABORT)

OK = Errors.NONE
CONCURRENT = Errors.CONCURRENT_TRANSACTIONS
FENCED = Errors.PRODUCER_FENCED
INVALID = Errors.INVALID_TXN_STATE
UNKNOWN = Errors.INVALID_PRODUCER_ID_MAPPING


def in_state(state: TransactionState, version: int) -> tuple[Coordinator, Producer]:
    """Returns a coordinator with a transactional id in this state, and its producer. `version` is that of EndTxn."""
    coordinator = Coordinator()
    producer = coordinator.initialized()
    if state is not EMPTY:
        coordinator.add(producer, ("t", 0), version=2 if version >= 5 else 0)
    if state not in (EMPTY, ONGOING):
        committed = state in (PREPARE_COMMIT, COMPLETE_COMMIT)
        producer = coordinator.end(producer, committed=committed, version=version)
    if state in (COMPLETE_COMMIT, COMPLETE_ABORT):
        coordinator.complete()
    assert coordinator.state is state
    return coordinator, producer


def older(producer: Producer) -> Producer:
    return Producer(producer.producer_id, producer.producer_epoch - 1)


REQUESTS: dict[str, Callable[[Coordinator, Producer], object]] = {
    "init": lambda c, p: c.init(),
    "init with producer": lambda c, p: c.init(p),
    "init with other id": lambda c, p: c.init(Producer(p.producer_id + 1, 0)),
    "add": lambda c, p: c.add(p, ("t", 1)),
    "add again": lambda c, p: c.add(p, ("t", 0)),
    "add by older": lambda c, p: c.add(older(p), ("t", 1)),
    "add by other id": lambda c, p: c.add(Producer(p.producer_id + 1, p.producer_epoch), ("t", 1)),
    "verify": lambda c, p: c.verify(p, ("t", 0)),
    "commit": lambda c, p: c.end(p),
    "abort": lambda c, p: c.end(p, committed=False),
    "commit by older": lambda c, p: c.end(older(p)),
    "abort by older": lambda c, p: c.end(older(p), committed=False),
    "commit by newer": lambda c, p: c.end(Producer(p.producer_id, p.producer_epoch + 1)),
    "commit by other id": lambda c, p: c.end(Producer(p.producer_id + 1, p.producer_epoch)),
}
# One column per state, in the order of STATES. With EndTxn v5 "older" is a producer that missed the response to EndTxn.
BUMPING: dict[str, tuple[Errors, ...]] = {
    "init": (OK, CONCURRENT, CONCURRENT, CONCURRENT, OK, OK),
    "init with producer": (OK, CONCURRENT, CONCURRENT, CONCURRENT, OK, OK),
    "init with other id": (FENCED,) * 6,
    "add": (OK, OK, CONCURRENT, CONCURRENT, OK, OK),
    "add again": (OK, OK, CONCURRENT, CONCURRENT, OK, OK),
    "add by older": (FENCED,) * 6,
    "add by other id": (UNKNOWN,) * 6,
    "verify": (OK, OK, CONCURRENT, CONCURRENT, OK, OK),
    "commit": (INVALID, OK, FENCED, FENCED, INVALID, INVALID),
    "abort": (OK, OK, FENCED, FENCED, OK, OK),
    "commit by older": (FENCED, FENCED, CONCURRENT, INVALID, OK, INVALID),
    "abort by older": (FENCED, FENCED, INVALID, CONCURRENT, INVALID, OK),
    "commit by newer": (FENCED,) * 6,
    "commit by other id": (UNKNOWN,) * 6,
}
OLD_REQUESTS = {
    "commit": (INVALID, OK, CONCURRENT, INVALID, OK, INVALID),
    "abort": (INVALID, OK, INVALID, CONCURRENT, INVALID, OK),
    "commit by older": (FENCED,) * 6,
    "abort by older": (FENCED,) * 6,
    "commit by newer": (FENCED,) * 6,
    "commit by other id": (UNKNOWN,) * 6,
}


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.wire_name)
@pytest.mark.parametrize("name", BUMPING)
def test_requests_of_producers_whose_epoch_is_bumped(name: str, state: TransactionState) -> None:
    coordinator, producer = in_state(state, 5)
    log = list(coordinator.log)
    error = error_of(lambda: REQUESTS[name](coordinator, producer))
    assert error is BUMPING[name][STATES.index(state)]
    if error not in (OK, CONCURRENT):
        assert coordinator.log == log


@pytest.mark.parametrize("state", STATES, ids=lambda state: state.wire_name)
@pytest.mark.parametrize("name", OLD_REQUESTS)
def test_end_of_producers_that_keep_their_epoch(name: str, state: TransactionState) -> None:
    coordinator, producer = in_state(state, 4)
    producers = {"older": older(producer), "newer": Producer(producer.producer_id, producer.producer_epoch + 1)}
    sender = producers.get(name.split()[-1], producer)
    if name.endswith("other id"):
        sender = Producer(producer.producer_id + 1, producer.producer_epoch)
    error = error_of(lambda: coordinator.end(sender, committed=name.startswith("commit"), version=4))
    assert error is OLD_REQUESTS[name][STATES.index(state)]
    if error is OK and state is not ONGOING:
        assert coordinator.state is state


def test_an_unknown_transactional_id_is_rejected() -> None:
    coordinator = Coordinator()
    producer = Producer(5, 0)
    assert error_of(lambda: coordinator.add(producer, ("t", 0))) is UNKNOWN
    assert error_of(lambda: coordinator.verify(producer, ("t", 0))) is UNKNOWN
    assert error_of(lambda: coordinator.end(producer)) is UNKNOWN
    assert error_of(lambda: coordinator.end(producer, version=3)) is UNKNOWN


@pytest.mark.parametrize("timeout_ms", [0, -1, 900_001])
def test_timeouts_out_of_range(timeout_ms: int) -> None:
    coordinator = Coordinator()
    assert error_of(lambda: coordinator.init(timeout_ms=timeout_ms)) is Errors.INVALID_TRANSACTION_TIMEOUT
    for limit_ms in (1, 900_000):
        assert error_of(lambda: coordinator.init(timeout_ms=limit_ms)) is OK  # noqa: B023


def test_the_table_of_states_has_no_transition_into_states_that_are_never_stored() -> None:
    assert set(LEGAL_PREDECESSORS) == set(STATES)
    assert [state.wire_name for state in TransactionState] == [
        "Empty",
        "Ongoing",
        "PrepareCommit",
        "PrepareAbort",
        "CompleteCommit",
        "CompleteAbort",
        "Dead",
        "PrepareEpochFence",
    ]


OWN, OTHER = 5, 4
"""The producer id, and an older producer id."""


@pytest.mark.parametrize(
    ("state", "version", "epoch", "previous_producer_id", "expected"),
    [
        *((state, 2, 3, OWN, 2) for state in (PREPARE_COMMIT, PREPARE_ABORT, COMPLETE_COMMIT, COMPLETE_ABORT)),
        *((state, 2, 3, OWN, NO_PRODUCER_EPOCH) for state in (EMPTY, ONGOING)),
        *((COMPLETE_COMMIT, version, 3, OWN, NO_PRODUCER_EPOCH) for version in (0, 1)),
        (COMPLETE_COMMIT, 2, 1, OWN, 0),
        (COMPLETE_COMMIT, 2, 1, OTHER, 0),
        (COMPLETE_COMMIT, 2, 0, OWN, NO_PRODUCER_EPOCH),
        (COMPLETE_ABORT, 2, 0, OTHER, EXHAUSTED_EPOCH),
        (EMPTY, 2, 0, OTHER, NO_PRODUCER_EPOCH),
        (COMPLETE_COMMIT, 1, 0, OTHER, NO_PRODUCER_EPOCH),
    ],
)
def test_which_older_epoch_a_producer_may_still_send(
    state: TransactionState, version: int, epoch: int, previous_producer_id: int, expected: int
) -> None:
    metadata = TransactionMetadata(
        "tx",
        OWN,
        epoch,
        1_000,
        state,
        0,
        previous_producer_id=previous_producer_id,
        client_transaction_version=version,
    )
    assert metadata.epoch_before_end == expected
