# SPDX-License-Identifier: Apache-2.0
"""The edges of an upstream log, one by one."""

from __future__ import annotations

import pytest

from kcoord.runtime.shard_log import Append, Load
from kcoord.runtime.upstream_actions import InitProducerId, LoadFailed, Produce
from kcoord.runtime.upstream_batches import CLAIM_KEY, MOST_CLAIMS, SETTLED_KEY
from kcoord.runtime.upstream_claim import LAST_EPOCH, RENEW_AFTER_MS, UpstreamState
from kcoord.runtime.upstream_log import UpstreamLog
from kcoord.simulation.upstream.partition import EPOCH_END
from kcoord_protocol.errors import Errors
from kcoord_protocol.record_batch import (
    ControlRecordType,
    decode_entries,
    decode_header,
    encode_batch_from_parts,
    encode_control_batch,
    end_txn_marker,
)
from tests.unit.runtime.upstream_walk import TIMEOUT_MS, WAIT_MS, World, entries_of


def marker(producer_id: int, epoch: int, kind: ControlRecordType = ControlRecordType.COMMIT) -> bytes:
    return encode_control_batch(kind, end_txn_marker(0), timestamp_ms=1, producer_id=producer_id, producer_epoch=epoch)


class Desk:
    """An owner whose requests the test answers by hand."""

    def __init__(self, world: World | None = None, instance: int = 0) -> None:
        self.world = world or World(0)
        self.owner = self.world.instances[instance]
        self.outcomes: list[str] = []
        handle = self.owner.handle

        def note(action: object) -> None:
            self.outcomes.append(type(action).__name__)
            handle(action)  # type: ignore[arg-type]

        self.owner.handle = note  # type: ignore[method-assign]

    @property
    def log(self) -> UpstreamLog:
        return self.owner.log

    def serve(self) -> Desk:
        self.owner.claim()
        self.answer_all()
        assert self.log.state is UpstreamState.OWNER
        return self

    def answer_all(self) -> None:
        while self.owner.in_flight or self.owner.follow_log():
            if self.owner.in_flight:
                self.owner.answer(self.owner.in_flight.pop(0))
                self.world.replicate()

    def begin(self, value: int) -> None:
        """Begins an append of one batch."""
        self.owner.append = Append(0, 0, 1, encode_batch_from_parts([(b"a", b"%d" % value)], 1))
        self.log.append(self.owner.append, self.world.now_ms)
        self.owner.settle()

    def put(self, value: int) -> Produce:
        """Begins an append of one batch. Returns its request."""
        self.begin(value)
        return self.sent()

    def sent(self) -> Produce:
        request = self.owner.in_flight.pop()
        assert isinstance(request, Produce)
        return request

    def refuse(self, request: Produce, error: Errors) -> None:
        self.owner.refuse(request, error)

    def pass_time(self, milliseconds: int) -> None:
        self.world.now_ms += milliseconds
        self.log.tick(self.world.now_ms)
        self.owner.settle()

    def values(self) -> list[int]:
        return [value for _, data in self.world.partition.batches for _, value in entries_of(data)]


@pytest.fixture
def desk() -> Desk:
    return Desk().serve()


def test_a_load_that_was_dropped_does_not_claim() -> None:
    log = UpstreamLog("test", write_timeout_ms=TIMEOUT_MS, foreign_id_wait_ms=WAIT_MS)
    load = Load(0, with_snapshot=True)
    log.open(load, 0)
    (request,) = log.actions
    assert isinstance(request, InitProducerId)
    load.is_dropped = True
    log.initialized(request, 1, 0, 10)
    assert [type(action) for action in log.actions[1:]] == [LoadFailed]


def test_a_claim_that_was_not_sent_is_given_up_with_its_load() -> None:
    log = UpstreamLog("test", write_timeout_ms=TIMEOUT_MS, foreign_id_wait_ms=WAIT_MS)
    load = Load(0, with_snapshot=True)
    log.open(load, 0)
    (request,) = log.actions
    assert isinstance(request, InitProducerId)
    log.initialized(request, 1, 0, 10)
    claim = log.actions[-1]
    assert isinstance(claim, Produce) and log.may_send(claim, 20)
    load.is_dropped = True
    assert not log.may_send(claim, 20)
    log.tick(20)
    assert isinstance(log.actions[-1], LoadFailed)


def test_an_append_is_written_when_the_upstream_has_it(desk: Desk) -> None:
    request = desk.put(7)
    header = decode_header(request.data)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (*desk.log.claimed_id, 2)
    assert "Written" not in desk.outcomes
    desk.owner.answer(request)
    assert "Written" not in desk.outcomes, "the batch is on the leader only"
    desk.world.replicate()
    assert desk.outcomes[-1] == "Written"
    assert entries_of(desk.world.partition.batches[-1][1]) == [(b"a", 7)]


def test_the_records_are_the_bytes_of_the_local_log(desk: Desk) -> None:
    data = encode_batch_from_parts([(b"a", b"1"), (b"b", None)], 123, base_offset=50)
    desk.owner.append = Append(0, 50, 52, data)
    desk.log.append(desk.owner.append, 1)
    desk.owner.settle()
    sent = desk.sent().data
    assert sent[61:] == data[61:]
    assert decode_header(sent).base_offset == 0


@pytest.mark.parametrize(
    "error",
    [
        Errors.NETWORK_EXCEPTION,
        Errors.REQUEST_TIMED_OUT,
        Errors.NOT_LEADER_OR_FOLLOWER,
        Errors.NOT_ENOUGH_REPLICAS,
        Errors.NOT_ENOUGH_REPLICAS_AFTER_APPEND,
        Errors.LEADER_NOT_AVAILABLE,
        Errors.UNKNOWN_TOPIC_OR_PARTITION,
        Errors.KAFKA_STORAGE_ERROR,
    ],
)
@pytest.mark.parametrize("arrives", [True, False])
def test_an_unknown_outcome_is_settled_by_the_same_bytes(desk: Desk, error: Errors, arrives: bool) -> None:
    first = desk.put(7)
    if arrives:
        desk.owner.produce(first, first.data)
    desk.refuse(first, error)
    assert desk.owner.in_flight == [], "the repetition waits for the backoff"
    desk.pass_time(20)
    again = desk.sent()
    assert again.data == first.data
    desk.owner.answer(again)
    desk.world.replicate()
    assert desk.outcomes[-1] == "Written"
    assert desk.values() == [7]


def test_the_backoff_doubles_up_to_a_second(desk: Desk) -> None:
    request = desk.put(7)
    waits = []
    for _ in range(8):
        before_ms = desk.world.now_ms
        desk.refuse(request, Errors.NOT_ENOUGH_REPLICAS)
        assert desk.log.retry_ms is not None
        desk.pass_time(desk.log.retry_ms - before_ms)
        waits.append(desk.world.now_ms - before_ms)
        request = desk.sent()
    assert waits == [20, 40, 80, 160, 320, 640, 1000, 1000]


def test_an_append_is_given_up_after_the_write_timeout(desk: Desk) -> None:
    request = desk.put(7)
    desk.pass_time(TIMEOUT_MS - 1)
    assert desk.log.may_send(request, desk.world.now_ms)
    assert "Unknown" not in desk.outcomes
    desk.pass_time(1)
    assert desk.outcomes[-1] == "Unknown"
    assert not desk.log.may_send(request, desk.world.now_ms)
    desk.owner.answer(request)
    desk.world.replicate()
    assert "Written" not in desk.outcomes, "the answer came too late"
    desk.serve()
    assert desk.owner.state == {b"a": 7}, "the new claim reads what was in the log all the same"


def test_an_older_owner_is_fenced(desk: Desk) -> None:
    first = desk.put(7)
    Desk(desk.world, 1).serve()
    desk.owner.answer(first)
    assert desk.outcomes[-1] == "Fenced"
    assert desk.log.state is UpstreamState.FENCED
    desk.log.append(Append(0, 0, 1, b""), desk.world.now_ms)
    desk.owner.settle()
    assert desk.outcomes[-1] == "Fenced"
    assert desk.values() == []


def test_a_retry_of_a_fenced_owner_is_not_acknowledged_although_the_first_copy_arrived(desk: Desk) -> None:
    first = desk.put(7)
    desk.owner.produce(first, first.data)
    desk.refuse(first, Errors.REQUEST_TIMED_OUT)
    second = Desk(desk.world, 1).serve()
    assert second.owner.state == {b"a": 7}
    desk.pass_time(20)
    desk.owner.answer(desk.sent())
    assert desk.outcomes[-1] == "Fenced"


def test_a_claim_that_another_claim_overtook_is_fenced() -> None:
    desk = Desk()
    desk.owner.claim()
    desk.owner.answer(desk.owner.in_flight.pop())
    Desk(desk.world, 1).serve()
    desk.answer_all()
    assert desk.outcomes[-1] == "Fenced"


@pytest.mark.parametrize("reads_first", [True, False])
def test_a_batch_of_another_writer_ends_the_ownership(desk: Desk, reads_first: bool) -> None:
    desk.world.partition.append(encode_batch_from_parts([(b"b", b"1")], 1, producer_id=5, producer_epoch=0))
    if reads_first:
        desk.world.replicate()
        desk.owner.follow_log()
        assert desk.outcomes[-1] == "Lost"
        return
    desk.owner.answer(desk.put(7))
    desk.world.replicate()
    assert "Written" not in desk.outcomes, "the batch before it is not known yet"
    desk.owner.follow_log()
    assert desk.outcomes[-1] == "Unknown"


@pytest.mark.parametrize("reads_first", [True, False])
def test_markers_and_void_batches_may_be_between_two_appends(desk: Desk, reads_first: bool) -> None:
    """A claim fences no batch of a transaction. Without the claim in a header it is void."""
    partition = desk.world.partition
    for producer_id, kind in ((5, ControlRecordType.COMMIT), (6, ControlRecordType.ABORT)):
        pairs: list[tuple[bytes | None, bytes | None]] = [(b"a", b"9")]
        partition.append(
            encode_batch_from_parts(
                pairs, 1, producer_id=producer_id, producer_epoch=0, base_sequence=0, is_transactional=True
            )
        )
        partition.append(marker(producer_id, 0, kind))
    if reads_first:
        desk.world.replicate()
        assert desk.owner.follow_log()
        assert desk.owner.follow_log()
    desk.owner.answer(desk.put(7))
    desk.world.replicate()
    assert ("Written" in desk.outcomes) is reads_first
    while desk.owner.follow_log():
        pass
    assert desk.outcomes.count("Ended") == 2
    assert desk.outcomes.count("Rewrite") == (2 if reads_first else 1), "only the first transaction was committed"
    assert "Written" in desk.outcomes
    desk.owner.answer(desk.put(8))
    desk.world.replicate()
    assert desk.outcomes[-1] == "Written"
    desk.serve()
    assert desk.owner.state == {b"a": 8}


def test_an_owner_reads_the_claim_of_another_one(desk: Desk) -> None:
    Desk(desk.world, 1).serve()
    desk.owner.follow_log()
    assert desk.outcomes[-1] == "Lost"
    assert desk.log.state is UpstreamState.FENCED


def test_offsets_that_the_log_has_lost_end_the_ownership(desk: Desk) -> None:
    partition = desk.world.partition
    partition.append(marker(5, 0))
    partition.append(marker(6, 0))
    desk.world.replicate()
    partition.batches.pop(-2)
    desk.owner.follow_log()
    assert desk.outcomes[-1] == "Lost"


def test_a_followed_log_that_is_shorter_ends_the_ownership(desk: Desk) -> None:
    desk.world.partition.truncate(0)
    desk.owner.follow_log()
    assert desk.outcomes[-1] == "Lost"


def test_a_duplicate_that_is_not_ours_is_not_acknowledged(desk: Desk) -> None:
    request = desk.put(7)
    desk.log.produced(request, 0, desk.world.now_ms)
    desk.owner.settle()
    assert desk.outcomes[-1] == "Unknown"


@pytest.mark.parametrize(
    "error",
    [
        Errors.OUT_OF_ORDER_SEQUENCE_NUMBER,
        Errors.DUPLICATE_SEQUENCE_NUMBER,
        Errors.MESSAGE_TOO_LARGE,
        Errors.TOPIC_AUTHORIZATION_FAILED,
        Errors.UNKNOWN_SERVER_ERROR,
    ],
)
def test_a_refusal_gives_the_append_up(desk: Desk, error: Errors) -> None:
    desk.refuse(desk.put(7), error)
    assert desk.outcomes[-1] == "Unknown"
    assert desk.log.state is UpstreamState.UNOWNED
    desk.serve()


def test_a_log_that_lost_its_tail_is_read_again(desk: Desk) -> None:
    desk.owner.answer(desk.put(7))
    desk.world.replicate()
    desk.world.partition.truncate(2)
    desk.owner.answer(desk.put(8))
    assert desk.outcomes[-1] == "Unknown"
    # The upstream has lost it. All that is left to do is to notice.
    desk.world.acknowledged.clear()
    desk.serve()
    assert desk.owner.state == {}


def test_a_topic_that_was_created_again_is_noticed(desk: Desk) -> None:
    desk.owner.answer(desk.put(7))
    desk.world.replicate()
    desk.world.partition.truncate(0)
    desk.owner.answer(desk.put(8))
    desk.world.replicate()
    assert desk.values() == [8], "a partition without producer state takes any sequence"
    assert desk.outcomes[-1] == "Unknown"


# -- renewals and producer ids -----------------------------------------------------------------------------------------


def test_an_idle_owner_renews_its_claim(desk: Desk) -> None:
    epoch = desk.log.claimed_id[1]
    desk.pass_time(RENEW_AFTER_MS - 1)
    assert desk.owner.in_flight == []
    desk.pass_time(1)
    desk.answer_all()
    assert desk.log.claimed_id[1] == epoch + 1
    desk.owner.answer(desk.put(7))
    desk.world.replicate()
    assert desk.outcomes[-1] == "Written"


def test_a_busy_owner_renews_its_claim_between_two_appends(desk: Desk) -> None:
    epoch = desk.log.claimed_id[1]
    for value in range(1, 4):
        desk.world.now_ms += RENEW_AFTER_MS // 2
        desk.begin(value)
        desk.answer_all()
    assert desk.outcomes.count("Written") == 3
    assert desk.log.claimed_id[1] == epoch + 1
    assert desk.values() == [1, 2, 3]


def test_an_owner_that_was_stopped_for_long_claims_before_it_appends(desk: Desk) -> None:
    """The partition may have forgotten the producer, and then it would fence nobody."""
    second = Desk(desk.world, 1).serve()
    desk.world.partition.producers.clear()
    desk.world.now_ms += RENEW_AFTER_MS
    desk.begin(7)
    assert [type(request) for request in desk.owner.in_flight] == [InitProducerId]
    desk.answer_all()
    assert desk.outcomes[-1] == "Unknown", "the claim is not at the expected offset"
    assert desk.values() == []
    second.begin(8)
    second.answer_all()
    assert second.outcomes[-1] == "Unknown", "the claim of the first is in the log before that of the second"


def test_an_idle_owner_learns_of_another_one_by_its_renewal(desk: Desk) -> None:
    Desk(desk.world, 1).serve()
    desk.pass_time(RENEW_AFTER_MS)
    while desk.owner.in_flight:
        desk.owner.answer(desk.owner.in_flight.pop(0))
        desk.world.replicate()
    desk.owner.follow_log()
    assert desk.outcomes[-1] == "Lost"


def test_a_renewal_that_fails_is_tried_again(desk: Desk) -> None:
    desk.pass_time(RENEW_AFTER_MS)
    desk.owner.refuse(desk.owner.in_flight.pop(), Errors.COORDINATOR_NOT_AVAILABLE)
    assert desk.owner.in_flight == []
    desk.pass_time(1_000)
    desk.answer_all()
    assert desk.log.claimed_id[1] == 1


def test_an_expired_producer_is_claimed_again_and_the_append_follows(desk: Desk) -> None:
    desk.refuse(desk.put(7), Errors.UNKNOWN_PRODUCER_ID)
    desk.answer_all()
    assert desk.outcomes[-1] == "Written"
    assert desk.values() == [7]
    assert desk.log.claimed_id[1] == 1


def test_an_expired_producer_with_an_unknown_outcome_gives_the_append_up(desk: Desk) -> None:
    desk.refuse(desk.put(7), Errors.REQUEST_TIMED_OUT)
    desk.pass_time(20)
    desk.refuse(desk.sent(), Errors.UNKNOWN_PRODUCER_ID)
    assert desk.outcomes[-1] == "Unknown"


def test_a_takeover_with_a_new_producer_id_waits_and_reads_to_a_second_claim(desk: Desk) -> None:
    late = desk.put(7)
    desk.world.coordinator.ids.clear()
    second = Desk(desk.world, 1)
    second.owner.claim()
    second.answer_all()
    assert second.log.state is UpstreamState.WAITING
    desk.owner.produce(late, late.data)
    desk.world.replicate()
    second.pass_time(WAIT_MS - 1)
    assert second.log.state is UpstreamState.WAITING
    second.pass_time(1)
    assert second.outcomes[-1] == "Held"
    second.serve()
    assert second.owner.state == {b"a": 7}


def test_takeovers_in_quick_succession_wait_too(desk: Desk) -> None:
    desk.world.coordinator.ids.clear()
    second = Desk(desk.world, 1)
    second.owner.claim()
    second.answer_all()
    desk.owner.crash()
    desk.owner.claim()
    desk.answer_all()
    assert desk.log.state is UpstreamState.WAITING, "the claim before has the same id, but nobody has waited for it yet"


def test_a_takeover_from_the_first_owner_of_a_new_log_does_not_wait() -> None:
    """Two instances start at the same time, and the first one loses the shard before it has served."""
    first = Desk()
    first.owner.claim()
    while first.log.state is not UpstreamState.READING:
        first.owner.answer(first.owner.in_flight.pop(0))
        first.world.replicate()
    second = Desk(first.world, 1).serve()
    assert second.log.claimed_id[0] == first.log.claimed_id[0]


def test_a_takeover_with_the_same_producer_id_does_not_wait(desk: Desk) -> None:
    assert Desk(desk.world, 1).serve().log.claimed_id[0] == desk.log.claimed_id[0]


def test_an_owner_changes_its_producer_id_before_the_epoch_runs_out(desk: Desk) -> None:
    old = desk.log.claimed_id[0]
    desk.world.coordinator.ids["shard"] = old, EPOCH_END - 3
    second = Desk(desk.world, 1).serve()
    assert second.log.claimed_id == (old + 1, 0), "the id has changed as soon as the owner served"
    assert second.log.state is UpstreamState.OWNER
    desk.owner.crash()
    assert desk.serve().log.claimed_id == (old + 1, 1), "the next takeover does not wait"


def test_an_owner_appends_under_its_old_id_while_it_asks_for_a_new_one(desk: Desk) -> None:
    old = desk.log.claimed_id[0]
    desk.world.coordinator.ids["shard"] = old, LAST_EPOCH
    desk.owner.crash()
    desk.owner.claim()
    while desk.log.state is not UpstreamState.OWNER:
        desk.owner.answer(desk.owner.in_flight.pop(0))
        desk.world.replicate()
    renewals = [request for request in desk.owner.in_flight if isinstance(request, InitProducerId)]
    desk.owner.in_flight.clear()
    desk.owner.answer(desk.put(7))
    desk.world.replicate()
    assert desk.outcomes[-1] == "Written"
    assert decode_header(desk.world.partition.batches[-1][1]).producer_id == old
    desk.owner.in_flight.extend(renewals)
    desk.answer_all()
    assert desk.log.claimed_id == (old + 1, 0)
    desk.owner.answer(desk.put(8))
    desk.world.replicate()
    assert desk.values() == [7, 8]
    assert desk.outcomes[-1] == "Written"


# -- reading -----------------------------------------------------------------------------------------------------------


def test_a_log_that_begins_later_is_read_from_its_beginning(desk: Desk) -> None:
    desk.owner.answer(desk.put(7))
    desk.world.replicate()
    desk.owner.crash()
    partition = desk.world.partition
    partition.start_offset = 1
    partition.batches = [batch for batch in partition.batches if batch[0].base_offset >= 1]
    desk.serve()
    assert desk.owner.state == {b"a": 7}


def test_a_claim_that_the_log_has_lost_fails_the_load() -> None:
    desk = Desk()
    desk.owner.claim()
    for _ in range(2):
        desk.owner.answer(desk.owner.in_flight.pop())
    desk.world.replicate()
    desk.world.partition.truncate(0)
    desk.world.partition.start_offset = 5
    desk.answer_all()
    assert desk.outcomes[-1] == "LoadFailed"


def test_a_corrupt_batch_fails_the_load(desk: Desk) -> None:
    desk.owner.crash()
    header, data = desk.world.partition.batches[0]
    desk.world.partition.batches[0] = header, data[:-1] + bytes([data[-1] ^ 1])
    desk.owner.claim()
    desk.answer_all()
    assert desk.outcomes[-1] == "LoadFailed"


def test_an_owner_that_fetches_a_corrupt_batch_gives_up(desk: Desk) -> None:
    """It may be the claim of another owner. A marker alone would change nothing."""
    partition = desk.world.partition
    partition.append(marker(5, 0))
    desk.world.replicate()
    header, data = partition.batches[-1]
    partition.batches[-1] = header, data[:-1] + bytes([data[-1] ^ 1])
    desk.owner.follow_log()
    assert (desk.log.state, desk.outcomes[-1]) == (UpstreamState.UNOWNED, "Lost")


def test_a_log_that_does_not_reach_the_claim_fails_the_load_after_the_timeout(desk: Desk) -> None:
    desk.owner.crash()
    desk.owner.claim()
    for _ in range(2):
        desk.owner.answer(desk.owner.in_flight.pop())
    desk.world.replicate()
    (fetch,) = desk.owner.in_flight
    for _ in range(3):
        desk.log.fetched(fetch, b"", desk.world.now_ms)  # type: ignore[arg-type]
        desk.owner.settle()
        fetch = desk.owner.in_flight[-1]
    desk.pass_time(TIMEOUT_MS)
    assert desk.outcomes[-1] == "LoadFailed"


def test_a_load_without_an_answer_fails_after_the_timeout() -> None:
    desk = Desk()
    desk.owner.claim()
    desk.pass_time(TIMEOUT_MS)
    assert desk.outcomes[-1] == "LoadFailed"
    assert desk.log.state is UpstreamState.UNOWNED


def test_an_owner_deletes_the_oldest_claims(desk: Desk) -> None:
    for _ in range(MOST_CLAIMS + 3):
        desk.owner.crash()
        desk.serve()
    entries = [entry for _, data in desk.world.partition.batches for entry in decode_entries(data)]
    claims = [key for _, key, value in entries if key and key.startswith(CLAIM_KEY) and value is not None]
    deleted = [key for _, key, value in entries if value is None]
    assert deleted == claims[:4]
    request = desk.put(1)
    desk.owner.answer(request)
    desk.world.replicate()
    assert desk.outcomes[-1] == "Written"


def test_claims_and_settled_records_are_not_loaded(desk: Desk) -> None:
    second = Desk(desk.world, 1).serve()
    keys = [decode_entries(data)[0][1] for _, data in desk.world.partition.batches]
    assert [key and key[:2] for key in keys] == [CLAIM_KEY, SETTLED_KEY, CLAIM_KEY]
    assert second.owner.state == {}
