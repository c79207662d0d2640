# SPDX-License-Identifier: Apache-2.0
"""Transactional batches of an upstream log, one by one: what is sent, decided, and read."""

from __future__ import annotations

import pytest

from kcoord.runtime.result import Producer
from kcoord.runtime.shard_log import Append, ProvisionalBatch
from kcoord.runtime.upstream_actions import Action, Decided, Ended, Produce, Rewrite, Unknown, Written
from kcoord.runtime.upstream_batches import Kind, ReadBatch, with_writer
from kcoord.runtime.upstream_claim import UpstreamState
from kcoord.runtime.upstream_reader import UpstreamReader
from kcoord_protocol.control_records import ControlRecordType, end_txn_marker
from kcoord_protocol.errors import Errors
from kcoord_protocol.record_batch import (
    decode_entries,
    decode_header,
    encode_batch_from_parts,
    encode_control_batch,
)
from tests.unit.runtime.test_upstream_log import Desk
from tests.unit.runtime.upstream_walk import KEPT_MS, TIMEOUT_MS

CLIENT, OTHER = Producer(500, 3), Producer(600, 0)


class TransactionDesk(Desk):
    """An owner, and what it reported: the decisions with their errors, and the other outcomes of interest."""

    def __init__(self) -> None:
        super().__init__()
        self.actions: list[Action] = []
        handle = self.owner.handle

        def note(action: Action) -> None:
            if isinstance(action, Decided | Ended | Written | Rewrite | Unknown):
                self.actions.append(action)
            if not isinstance(action, Decided | Written):
                handle(action)

        self.owner.handle = note  # type: ignore[method-assign]
        self.serve()
        self.earlier_claim = self.log.claimed_id
        """The claim of an earlier owner, whose late batches are void."""
        self.owner.crash()
        self.serve()

    def append(self, *batches: tuple[Producer | None, bytes], stale: bool = False) -> Append:
        """Appends batches of one record: of a client, or (None) of the owner."""
        data = b""
        provisional: dict[int, ProvisionalBatch] = {}
        for offset, (producer, key) in enumerate(batches):
            if producer is None:
                data += encode_batch_from_parts([(key, b"1")], 1, offset)
                continue
            data += encode_batch_from_parts(
                [(key, b"1")],
                1,
                offset,
                producer_id=producer.producer_id,
                producer_epoch=producer.producer_epoch,
                is_transactional=True,
            )
            provisional[offset] = ProvisionalBatch(f"tx-{producer.producer_id}", stale)
        append = Append(0, 0, len(batches), data, provisional)
        self.log.append(append, self.world.now_ms)
        self.owner.settle()
        return append

    def commit(self, producer: Producer = CLIENT, key: bytes = b"k") -> Produce:
        """Begins an append of one transactional batch. Returns its request."""
        self.append((producer, key))
        return self.sent()

    def arrive(self, request: Produce) -> int:
        """The request arrives at the upstream. Returns the offset of its batch; the answer is still to come."""
        offset = self.world.partition.append(request.data)
        self.world.replicate()
        return offset

    def answer(self, request: Produce, offset: int) -> None:
        self.log.produced(request, offset, self.world.now_ms)
        self.owner.settle()

    def end(self, producer: Producer = CLIENT, kind: ControlRecordType = ControlRecordType.COMMIT) -> None:
        """The upstream writes a marker."""
        producer_id, epoch = producer
        marker = encode_control_batch(
            kind, end_txn_marker(0), timestamp_ms=1, producer_id=producer_id, producer_epoch=epoch
        )
        self.world.partition.append(marker)
        self.world.replicate()

    def follow(self) -> None:
        while self.owner.follow_log():
            pass

    def decisions(self) -> list[str]:
        """Returns the outcomes since the last call, in order."""
        actions, self.actions = self.actions, []
        return [
            f"{action.offset} {action.error.error.name if action.error else 'accepted'}"
            if isinstance(action, Decided)
            else type(action).__name__
            for action in actions
        ]


@pytest.fixture
def desk() -> TransactionDesk:
    return TransactionDesk()


def test_a_batch_of_a_client_has_its_producer_the_next_sequence_and_the_claim_of_the_owner(
    desk: TransactionDesk,
) -> None:
    for sequence in range(3):
        request = desk.commit()
        header = decode_header(request.data)
        assert (header.producer_id, header.producer_epoch, header.base_sequence) == (*CLIENT, sequence)
        assert header.is_transactional
        assert request.transactional_id == "tx-500"
        desk.answer(request, desk.arrive(request))
        desk.follow()
    assert desk.decisions() == ["0 accepted", "Written"] * 3


def test_a_batch_is_accepted_when_it_was_answered_and_read_back(desk: TransactionDesk) -> None:
    hurries = [desk.log.is_in_a_hurry]
    request = desk.commit()
    hurries.append(desk.log.is_in_a_hurry)
    assert hurries == [False, True]
    desk.answer(request, desk.arrive(request))
    assert desk.decisions() == []
    assert desk.log.is_in_a_hurry
    desk.follow()
    assert desk.decisions() == ["0 accepted", "Written"]
    request = desk.commit()
    offset = desk.arrive(request)
    desk.follow()
    assert desk.decisions() == [], "it may not be on enough replicas"
    desk.answer(request, offset)
    assert desk.decisions() == ["0 accepted", "Written"]


def test_a_batch_that_the_upstream_took_for_a_repetition_is_refused(desk: TransactionDesk) -> None:
    """Another owner has written a batch with the same sequence number, in the same transaction."""
    request = desk.commit()
    zombie = with_writer(_batch(CLIENT, b"z"), desk.earlier_claim, 0, 0)
    assert desk.world.partition.append(zombie) == desk.world.partition.append(request.data)
    desk.world.replicate()
    desk.answer(request, desk.world.partition.end_offset - 1)
    desk.follow()
    assert desk.decisions() == ["0 COORDINATOR_NOT_AVAILABLE", "Written"]
    again = desk.commit()
    assert decode_header(again.data).base_sequence == 1, "the leader has counted the batch of the other owner"
    desk.answer(again, desk.arrive(again))
    desk.end()
    desk.follow()
    assert desk.decisions() == ["0 accepted", "Written", "Ended", "Rewrite"]


@pytest.mark.parametrize(
    "error",
    [
        Errors.INVALID_PRODUCER_EPOCH,
        Errors.PRODUCER_FENCED,
        Errors.OUT_OF_ORDER_SEQUENCE_NUMBER,
        Errors.INVALID_TXN_STATE,
        Errors.TRANSACTION_ABORTABLE,
        Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        Errors.INVALID_PRODUCER_ID_MAPPING,
    ],
)
def test_an_error_of_the_transaction_refuses_the_batch_and_the_append_goes_on(
    desk: TransactionDesk, error: Errors
) -> None:
    desk.append((None, b"a"), (CLIENT, b"k"), (OTHER, b"l"), (None, b"b"))
    first = desk.sent()
    desk.answer(first, desk.arrive(first))
    desk.refuse(desk.sent(), error)
    assert desk.decisions() == [f"1 {error.name}"]
    third = desk.sent()
    assert decode_header(third.data).producer_id == OTHER.producer_id
    desk.answer(third, desk.arrive(third))
    desk.follow()
    last = desk.sent()
    desk.answer(last, desk.arrive(last))
    assert desk.decisions() == ["2 accepted", "Written"]
    keys = [entry[1] for _, data in desk.world.partition.batches for entry in decode_entries(data)]
    assert keys[-3:] == [b"a", b"l", b"b"]
    assert desk.log.state is UpstreamState.OWNER


@pytest.mark.parametrize("error", [Errors.NOT_ENOUGH_REPLICAS, Errors.CONCURRENT_TRANSACTIONS])
def test_a_batch_that_could_not_be_verified_is_refused_and_the_client_repeats_it(
    desk: TransactionDesk, error: Errors
) -> None:
    """Apache Kafka returns NOT_ENOUGH_REPLICAS while another partition is added to the transaction, or it ends."""
    desk.refuse(desk.commit(), error)
    assert desk.decisions() == ["0 COORDINATOR_LOAD_IN_PROGRESS", "Written"]


@pytest.mark.parametrize("error", [Errors.NOT_ENOUGH_REPLICAS, Errors.REQUEST_TIMED_OUT])
def test_an_unknown_outcome_is_settled_by_the_same_bytes(desk: TransactionDesk, error: Errors) -> None:
    first = desk.commit()
    desk.refuse(first, Errors.NETWORK_EXCEPTION)
    desk.pass_time(20)
    desk.refuse(desk.sent(), error)
    assert desk.decisions() == [], "the first attempt may be in the log"
    desk.pass_time(40)
    again = desk.sent()
    assert (again.data, again.transactional_id) == (first.data, first.transactional_id)
    desk.answer(again, desk.arrive(again))
    desk.follow()
    assert desk.decisions() == ["0 accepted", "Written"]


def test_a_batch_that_is_in_the_log_is_accepted_whatever_the_last_error_is(desk: TransactionDesk) -> None:
    request = desk.commit()
    desk.arrive(request)
    desk.follow()
    desk.refuse(request, Errors.REQUEST_TIMED_OUT)
    desk.pass_time(20)
    desk.refuse(desk.sent(), Errors.INVALID_TXN_STATE)
    assert desk.decisions() == ["0 accepted", "Written"]


def test_a_refused_batch_that_turns_up_ends_the_ownership(desk: TransactionDesk) -> None:
    request = desk.commit()
    desk.refuse(request, Errors.REQUEST_TIMED_OUT)
    desk.pass_time(20)
    desk.refuse(desk.sent(), Errors.INVALID_TXN_STATE)
    assert desk.decisions() == ["0 INVALID_TXN_STATE", "Written"]
    desk.arrive(request)
    desk.follow()
    assert desk.log.state is UpstreamState.UNOWNED


def test_a_batch_without_an_answer_is_given_up_with_the_append(desk: TransactionDesk) -> None:
    desk.commit()
    desk.pass_time(TIMEOUT_MS)
    assert desk.decisions() == ["Unknown"]


# -- markers -----------------------------------------------------------------------------------------------------------


def test_a_marker_is_passed_on_after_the_batches_before_it(desk: TransactionDesk) -> None:
    request = desk.commit()
    offset = desk.arrive(request)
    desk.end()
    desk.answer(request, offset)
    desk.follow()
    assert desk.decisions() == ["0 accepted", "Written", "Ended"]
    assert not desk.log.is_in_a_hurry


def test_a_marker_of_the_client_refuses_what_is_not_in_the_log(desk: TransactionDesk) -> None:
    """The client has given the request up, and may be in its next transaction with the same epoch."""
    append = desk.append((CLIENT, b"k"), (OTHER, b"l"), (CLIENT, b"m"), (None, b"a"))
    late = desk.sent()
    desk.end(kind=ControlRecordType.ABORT)
    desk.follow()
    assert desk.decisions() == ["0 COORDINATOR_LOAD_IN_PROGRESS", "Ended"]
    assert not desk.log.may_send(late, desk.world.now_ms), "it must not be sent any more"
    other = desk.sent()
    desk.arrive(late)
    desk.answer(other, desk.arrive(other))
    desk.follow()
    assert append.provisional[2].is_stale
    assert desk.decisions() == ["1 accepted", "2 COORDINATOR_LOAD_IN_PROGRESS"]
    plain = desk.sent()
    desk.answer(plain, desk.arrive(plain))
    assert desk.decisions() == ["Written"]
    desk.owner.crash()
    desk.serve()
    assert desk.owner.state is not None
    kinds = {read.header.producer_id: read.kind for read in _read(desk)}
    assert kinds[CLIENT.producer_id] is Kind.VOID, "it arrived after the marker"
    assert kinds[OTHER.producer_id] is Kind.TRANSACTIONAL


def test_a_batch_before_the_marker_counts_although_its_answer_is_still_to_come(desk: TransactionDesk) -> None:
    desk.arrive(desk.commit())
    desk.end()
    desk.follow()
    assert desk.decisions() == ["0 accepted", "Written", "Ended"]


def test_a_batch_that_is_stale_already_is_not_sent(desk: TransactionDesk) -> None:
    desk.append((CLIENT, b"k"), stale=True)
    assert desk.owner.in_flight == []
    assert desk.decisions() == ["0 COORDINATOR_LOAD_IN_PROGRESS", "Written"]


def test_a_load_passes_valid_batches_and_markers_and_then_the_keys_to_rewrite(desk: TransactionDesk) -> None:
    partition = desk.world.partition
    partition.append(with_writer(_batch(OTHER, b"void"), desk.earlier_claim, 0, 0))
    request = desk.commit()
    desk.answer(request, desk.arrive(request))
    desk.end(OTHER)
    desk.end()
    desk.owner.crash()
    desk.actions.clear()
    loaded: list[int] = []
    handle = desk.owner.handle

    def note(action: Action) -> None:
        loaded.extend(header.producer_id for header, _ in getattr(action, "batches", ()))
        handle(action)

    desk.owner.handle = note  # type: ignore[method-assign]
    desk.serve()
    assert loaded == [CLIENT.producer_id, OTHER.producer_id, CLIENT.producer_id]
    (rewrite,) = [action for action in desk.actions if isinstance(action, Rewrite)]
    assert rewrite.keys == {b"void"}


def test_void_batches_stay_void_if_owners_end_before_they_rewrite_and_the_log_is_compacted(
    desk: TransactionDesk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The claim that makes a batch void is still in the log, although others have claimed the log since."""
    partition = desk.world.partition
    partition.append(with_writer(_batch(CLIENT, b"void"), desk.earlier_claim, 0, 0))
    desk.end()
    for _ in range(3):
        desk.owner.crash()
        desk.owner.claim()
        for _ in ("InitProducerId", "claim"):
            desk.owner.answer(desk.owner.in_flight.pop(0))
            desk.world.replicate()
    monkeypatch.setattr(partition.random, "randint", lambda least, most: least)
    partition.compact(desk.world.now_ms, KEPT_MS)
    desk.owner.crash()
    desk.serve()
    assert [read.kind for read in _read(desk)] == [Kind.VOID]
    assert [action.keys for action in desk.actions if isinstance(action, Rewrite)] == [{b"void"}]


def test_keys_are_rewritten_after_a_refusal_since_the_batch_may_have_kept_one(desk: TransactionDesk) -> None:
    desk.world.partition.append(with_writer(_batch(OTHER, b"void"), desk.earlier_claim, 0, 0))
    desk.end(OTHER)
    desk.follow()
    assert desk.decisions() == ["Ended", "Rewrite"]
    desk.refuse(desk.commit(), Errors.INVALID_TXN_STATE)
    assert desk.decisions() == ["0 INVALID_TXN_STATE", "Rewrite", "Written"]
    desk.append((None, b"void"))
    plain = desk.sent()
    desk.answer(plain, desk.arrive(plain))
    desk.refuse(desk.commit(), Errors.INVALID_TXN_STATE)
    assert desk.decisions() == ["Written", "0 INVALID_TXN_STATE", "Written"]


def test_a_renewal_waits_for_a_transactional_batch(desk: TransactionDesk) -> None:
    """Its header names the claim, so it must be in the log before the next claim."""
    request = desk.commit()
    claimed = desk.log.claimed_id
    desk.log._next_id = claimed[0], claimed[1] + 1
    offset = desk.arrive(request)
    desk.answer(request, offset)
    assert desk.owner.in_flight == []
    desk.follow()
    assert desk.log.claimed_id == (claimed[0], claimed[1] + 1)
    assert decode_header(desk.sent().data).producer_id == claimed[0]


def _batch(producer: Producer, key: bytes) -> bytes:
    producer_id, epoch = producer
    return encode_batch_from_parts(
        [(key, b"1")], 1, producer_id=producer_id, producer_epoch=epoch, is_transactional=True
    )


def _read(desk: TransactionDesk) -> list[ReadBatch]:
    data = b"".join(data for _, data in desk.world.partition.batches)
    return [read for read in UpstreamReader(0).read(data, 0) if read.kind in (Kind.VOID, Kind.TRANSACTIONAL)]
