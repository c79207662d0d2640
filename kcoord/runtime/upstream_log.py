# SPDX-License-Identifier: Apache-2.0
"""The log of one shard in a partition of another Kafka cluster, the upstream: the requests and what the answers mean.

Theory of operation
-------------------
An `UpstreamLog` has no clock and does no IO. Its caller passes in the requests of the shard set
(`kcoord.runtime.shard_log`), the answers of the upstream, and the time. After each call it takes the `actions`:
requests to send to the upstream, and outcomes for the shard set. A request is its own ticket. The answer of a request
that the log does not wait for any more is ignored.

Two instances may believe that they own the shard. These rules keep all acknowledged records:

1. A new owner gets a producer id and an epoch that no earlier owner had (InitProducerId with the transactional id of
   the shard). Until the next step, the old owner can still append.
2. It appends a claim: one record, idempotent and not transactional, under the new epoch. From then on the leader of the
   partition rejects every batch of an older epoch with INVALID_PRODUCER_EPOCH.
3. It reads the partition up to its claim, and serves. So it has every batch that the old owner could append.
4. An append is one batch with the owner's epoch and the next sequence number. If the outcome is unknown, the same bytes
   are sent again until it is known: the leader recognizes the repetition, and returns the offset of the first copy.
5. An append counts only if its batch has exactly the offset at which the owner expects it. Otherwise there is a batch
   that the owner did not write, the log was truncated, or the answer belongs to another batch. Then the owner gives
   the shard up, acknowledges nothing, and begins again at step 1.

    UNOWNED      -> INITIALIZING  open
    INITIALIZING -> CLAIMING      the producer id and the epoch are known
    CLAIMING     -> READING       the claim is in the log: `Opened`
    READING      -> OWNER         the log is read up to the claim
    READING      -> WAITING       an earlier owner may have another producer id
    WAITING      -> UNOWNED       that owner has stopped: `Held`, the shard set opens the log once more
    OWNER        -> UNOWNED       an append was given up, or its offset is not the expected one: `Unknown` or `Lost`
    any          -> FENCED        another owner has claimed the log: `Fenced` or `Lost`
    any          -> UNOWNED       close; a load that cannot continue: `LoadFailed`

A retriable error repeats the request after a backoff that doubles. After `write_timeout_ms` the append or load is given
up: `Unknown` or `LoadFailed`. So too few in-sync replicas or a missing leader delay an append, and nothing is lost.

The producer state of the partition expires after a day without a batch, and the transactional id after a week without
InitProducerId. A partition without producer state fences nobody, and recognizes no repetition. The age of a batch is
that of its largest timestamp, so the timestamps have to be those of the leader (`message.timestamp.type`). The owner
renews its claim, by steps 1 and 2, every `renew_after_ms`. If it has not heard from the partition for so long, an
append waits for the renewal. The renewed claim must have the expected offset too (rule 5), which proves that there was
no other owner meanwhile.

A new producer id does not fence the old one. A takeover gets a new id if the transactional id has expired, or if the
epoch has run out. Then the new owner serves only after `foreign_id_wait_ms`, and after a second claim that it reads up
to. To recognize this also after takeovers in quick succession, the first owner with an id that serves writes a settled
record: owners with earlier ids have stopped. An owner waits if the log has batches of other owners, and no settled
record with its own id. A claim at offset 0 counts as settled, because no other owner was before it. An owner whose
epoch exceeds `LAST_EPOCH` gets a new id itself, before the epoch runs out. It asks for producer ids until the id
changes, and appends under the old id meanwhile.

Transactional batches in the partition are not of an owner, since claims do not fence them. They are not loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from kcoord.runtime.shard_log import Append, Load
from kcoord.runtime.upstream_actions import (
    Action,
    Fenced,
    Fetch,
    FindStart,
    Held,
    InitProducerId,
    Loaded,
    LoadFailed,
    Lost,
    Opened,
    Produce,
    Request,
    Unknown,
    Written,
)
from kcoord.runtime.upstream_reader import CLAIM_KEY, SETTLED_KEY, BatchId, DivergedError, UpstreamReader
from kcoord_protocol.batch_header import stamp_producer
from kcoord_protocol.errors import CorruptBatchError, Errors, KafkaError
from kcoord_protocol.record_batch import encode_batch_from_parts, walk_batches

_VERSION: Final = (0).to_bytes(2, "big")
LAST_EPOCH: Final = 30_000
"""With a later epoch an owner changes its producer id. The largest epoch of the protocol is 32,767."""
RENEW_AFTER_MS: Final = 6 * 3_600_000
"""A quarter of the default of `producer.id.expiration.ms`."""
FIRST_RETRY_MS: Final = 20
LONGEST_RETRY_MS: Final = 1_000
_MAX_SEQUENCE: Final = 0x7FFF_FFFF
_NEVER: Final = float("inf")
_FENCED: Final = frozenset({Errors.INVALID_PRODUCER_EPOCH, Errors.PRODUCER_FENCED})


class UpstreamState(Enum):
    """The states of the log. The module docstring has the transitions."""

    UNOWNED = "unowned"
    INITIALIZING = "initializing"
    CLAIMING = "claiming"
    READING = "reading"
    WAITING = "waiting"
    OWNER = "owner"
    FENCED = "fenced"


@dataclass(slots=True)
class _OwnBatch:
    """A batch that is being produced, with the owner's producer id, epoch and sequence number."""

    data: bytes
    count: int
    is_claim: bool = False
    is_settled: bool = False


class UpstreamLog:
    """One shard's log. The module docstring describes the states and who calls what.

    `owner` is stored in each claim, for people who read the log. `write_timeout_ms`: the time after which an
    append or a step of a load is given up. `foreign_id_wait_ms`: the time after which an owner with another producer id
    surely appends nothing any more.
    """

    def __init__(
        self,
        owner: str,
        *,
        write_timeout_ms: int,
        foreign_id_wait_ms: int,
        renew_after_ms: int = RENEW_AFTER_MS,
    ) -> None:
        self.state = UpstreamState.UNOWNED
        self.actions: list[Action] = []
        self.producer_id = self.epoch = -1
        self._owner = _VERSION + owner.encode()
        self._write_timeout_ms = write_timeout_ms
        self._foreign_id_wait_ms = foreign_id_wait_ms
        self._renew_after_ms = renew_after_ms
        self._request: Request | None = None
        """The request whose answer the load or the append waits for."""
        self._attempts = 0
        self._retry_ms = _NEVER
        self._deadline_ms = _NEVER
        self._last_error = "no answer"
        self._load: Load | None = None
        self.reader = UpstreamReader(0)
        """What this instance knows of the log. Each load begins with a new reader, or with that of the standby."""
        self._waited_id = -1
        """The producer id for which this instance has waited. Owners with earlier ids have stopped."""
        self._claim: BatchId | None = None
        self._claimed_ms = 0
        self._append: Append | None = None
        self._waiting: list[tuple[bytes, int]] = []
        """The batches of the append that were not sent yet, with their numbers of records."""
        self._batch: _OwnBatch | None = None
        self._sequence = 0
        self._end_offset = 0
        """The offset at which the next batch has to be."""
        self._heard_ms = 0
        """The owner was the owner at this time: the last batch that succeeded was sent then."""
        self._renewal: InitProducerId | None = None
        self._next_id: tuple[int, int] | None = None
        """The producer id and the epoch of the renewal, which are not claimed yet."""
        self._renewal_ms: float = 0
        """The time from which a renewal may begin."""

    # Called for the shard set.

    def open(self, load: Load, now_ms: int, reader: UpstreamReader | None = None) -> None:
        """Begins to claim the log. The outcome is `Opened`, `Held`, `LoadFailed` or `Fenced`.

        `reader` is that of a standby, whose state machine has everything below the reader's position.
        """
        self._reset(UpstreamState.INITIALIZING)
        self._load = load
        self.reader = reader or UpstreamReader(now_ms)
        self._deadline_ms = now_ms + self._write_timeout_ms
        self._send(InitProducerId())

    def read(self, load: Load) -> None:
        """Reads the next batches. The outcome is `Loaded`, `Held` or `LoadFailed`."""
        if load is self._load and self.state is UpstreamState.READING and self._request is None:
            self._send(Fetch(self.reader.fetch_offset))

    def append(self, append: Append, now_ms: int) -> None:
        """Appends batches. The outcome is `Written`, `Unknown` or `Fenced`."""
        if self.state is not UpstreamState.OWNER:
            is_fenced = self.state is UpstreamState.FENCED
            self.actions.append(Fenced(append) if is_fenced else Unknown(append, "the log is not claimed"))
            return
        self._append = append
        self._waiting = [
            (append.data[position : position + 12 + fields[1]], fields[12])
            for position, fields in walk_batches(append.data)
        ]
        self._deadline_ms = now_ms + self._write_timeout_ms
        self._continue(now_ms)

    def close(self) -> None:
        """Gives up the claim. Answers that arrive later are ignored."""
        self._reset(UpstreamState.UNOWNED)

    def revoke(self, reason: str) -> None:
        """Ends a load, an append or the ownership, because this instance may not act as the owner any more."""
        if self.state not in (UpstreamState.UNOWNED, UpstreamState.FENCED):
            self._give_up(reason)

    def tick(self, now_ms: int) -> None:
        """Repeats, renews, or gives up what is due. Called at least once a second, and at `retry_ms`."""
        if now_ms >= self._deadline_ms:
            self._give_up(f"gave up after {self._write_timeout_ms} ms: {self._last_error}")
        elif self.state is UpstreamState.WAITING:
            if now_ms >= self._claimed_ms + self._foreign_id_wait_ms:
                load = self._load
                assert load is not None
                self._waited_id = self.producer_id
                self._reset(UpstreamState.UNOWNED)
                self.actions.append(Held(load))
        elif now_ms >= self._retry_ms:
            self._repeat(now_ms)
        elif self.state is UpstreamState.OWNER:
            self._continue(now_ms)

    @property
    def claimed_id(self) -> tuple[int, int]:
        """The producer id and the epoch of the last claim."""
        return self.producer_id, self.epoch

    @property
    def retry_ms(self) -> int | None:
        """The time at which the failed request is repeated, None if no request has failed."""
        return int(self._retry_ms) if self._retry_ms < _NEVER else None

    def may_send(self, request: Produce, now_ms: int) -> bool:
        """True if the request still makes sense: the log waits for it, and its time is not over."""
        return request is self._request and now_ms < self._deadline_ms

    # Answers.

    def initialized(self, request: InitProducerId, producer_id: int, epoch: int, now_ms: int) -> None:
        """The upstream returned a producer id and an epoch."""
        if request is self._renewal:
            self._renewal = None
            if producer_id == self.producer_id and epoch > LAST_EPOCH:
                self._renew()
            else:
                self._next_id = producer_id, epoch
                self._continue(now_ms)
        elif request is self._request:
            self._request = None
            self._attempts = 0
            self.state = UpstreamState.CLAIMING
            self._begin_claim(producer_id, epoch, now_ms)

    def produced(self, request: Produce, base_offset: int, now_ms: int) -> None:
        """The upstream has the batch at `base_offset`, on all in-sync replicas."""
        if request is not self._request:
            return
        batch = self._batch
        assert batch is not None
        self._request = self._batch = None
        self._attempts = 0
        self._heard_ms = request.created_ms
        if self.state is UpstreamState.CLAIMING:
            assert self._load is not None
            self._claim = BatchId(base_offset, base_offset + 1, -1, self.producer_id, self.epoch, 0)
            self._claimed_ms = now_ms
            self._end_offset = base_offset + 1
            self._sequence = 1
            self._deadline_ms = _NEVER
            self.state = UpstreamState.READING
            self.reader.distrust()
            self.actions.append(Opened(self._load, self._end_offset))
            return
        if base_offset != self._end_offset:
            self._give_up(
                f"the batch is at offset {base_offset} and not at {self._end_offset}, "
                "so the log has batches of others, or has lost some"
            )
            return
        self._end_offset += batch.count
        self.reader.appended(BatchId(base_offset, self._end_offset, -1, self.producer_id, self.epoch, self._sequence))
        self._sequence = (self._sequence + batch.count) & _MAX_SEQUENCE
        if batch.is_claim:
            self._claimed_ms = now_ms
        elif batch.is_settled:
            self.reader.settled_id = self.producer_id
        elif not self._waiting:
            append, self._append = self._append, None
            assert append is not None
            self._deadline_ms = _NEVER
            self.actions.append(Written(append))
        self._continue(now_ms)

    def fetched(self, request: Fetch, data: bytes, now_ms: int) -> None:
        """The upstream returned batches. The last one may be cut off, and the first ones may be below the offset."""
        load, claim = self._load, self._claim
        if request is not self._request or load is None or claim is None:
            return
        self._request = None
        self._attempts = 0
        reader = self.reader
        before = reader.position, reader.is_verified
        try:
            batches = reader.take(data, now_ms, claim)
        except CorruptBatchError as error:
            self._give_up(f"a fetched batch is corrupt: {error}")
            return
        except DivergedError as error:
            self._give_up(str(error))
            return
        is_end = reader.last is not None and reader.last.is_same(claim)
        if not is_end and (reader.position, reader.is_verified) == before:
            if self._deadline_ms == _NEVER:
                self._deadline_ms = now_ms + self._write_timeout_ms
                self._last_error = f"no batches at offset {request.offset}, the claim is at {claim.base_offset}"
            self._send(Fetch(reader.fetch_offset))
            return
        self._deadline_ms = _NEVER
        if not is_end:
            self.actions.append(Loaded(load, batches, is_end=False))
        elif reader.has_owner and self.producer_id not in (reader.settled_id, self._waited_id):
            self.state = UpstreamState.WAITING
        else:
            self.state = UpstreamState.OWNER
            self._load = None
            reader.has_owner = True
            self.actions.append(Loaded(load, batches, is_end=True))
            self._continue(now_ms)

    def found_start(self, request: FindStart, offset: int, now_ms: int) -> None:
        """The first offset of the partition is `offset`."""
        if request is not self._request or self._claim is None:
            return
        try:
            self.reader.begin_at(offset)
        except DivergedError as error:
            self._give_up(f"the log begins at offset {offset}: {error}")
            return
        if offset <= self._claim.base_offset:
            self._send(Fetch(offset))
        else:
            self._give_up(f"the log begins at offset {offset}, and the claim was at {self._claim.base_offset}")

    def refused(self, request: Request, error: KafkaError, now_ms: int) -> None:
        """The upstream rejected a request, or its outcome is unknown."""
        if request is self._renewal:
            self._renewal = None
            self._renewal_ms = now_ms + LONGEST_RETRY_MS
            self._last_error = f"the claim was not renewed: {error}"
            return
        if request is not self._request:
            return
        self._last_error = str(error)
        code = error.error
        is_produce = isinstance(request, Produce)
        if is_produce and code in _FENCED:
            self._lose(UpstreamState.FENCED, "another instance has claimed the log")
        elif code is Errors.OFFSET_OUT_OF_RANGE and isinstance(request, Fetch):
            self._send(FindStart())
        elif code is Errors.UNKNOWN_PRODUCER_ID and self._is_first_attempt_of_append():
            # An old broker has dropped the producer state. The batch was not appended and can follow a renewed claim.
            assert self._batch is not None
            self._waiting.insert(0, (self._batch.data, self._batch.count))
            self._request = self._batch = None
            self._heard_ms = now_ms - self._renew_after_ms
            self._continue(now_ms)
        elif code.retriable:
            self._attempts += 1
            self._retry_ms = now_ms + min(FIRST_RETRY_MS << min(self._attempts - 1, 10), LONGEST_RETRY_MS)
        else:
            self._give_up(f"the upstream refused {type(request).__name__}: {error}")

    # Requests.

    def _send(self, request: Request) -> None:
        self._request = request
        self._retry_ms = _NEVER
        self.actions.append(request)

    def _repeat(self, now_ms: int) -> None:
        """Sends the request again that failed: the same bytes, with a new ticket."""
        match self._request:
            case InitProducerId():
                self._send(InitProducerId())
            case Produce(data):
                self._send(Produce(data, now_ms))
            case Fetch(offset):
                self._send(Fetch(offset))
            case FindStart():
                self._send(FindStart())

    def _begin_claim(self, producer_id: int, epoch: int, now_ms: int) -> None:
        self.producer_id, self.epoch, self._sequence = producer_id, epoch, 0
        self._begin_batch(_OwnBatch(self._record(CLAIM_KEY, now_ms), 1, is_claim=True), now_ms)

    def _record(self, key: bytes, now_ms: int) -> bytes:
        return encode_batch_from_parts([(key, self._owner)], now_ms)

    def _begin_batch(self, batch: _OwnBatch, now_ms: int) -> None:
        batch.data = stamp_producer(batch.data, self.producer_id, self.epoch, self._sequence)
        self._batch = batch
        self._send(Produce(batch.data, now_ms))

    def _continue(self, now_ms: int) -> None:
        """Sends the next batch of an owner: a renewed claim, the next one of the append, or a settled record."""
        if self.state is not UpstreamState.OWNER:
            return
        is_stale = now_ms - self._heard_ms >= self._renew_after_ms
        is_due = is_stale or now_ms - self._claimed_ms >= self._renew_after_ms or self.epoch > LAST_EPOCH
        if is_due and self._renewal is None and self._next_id is None and now_ms >= self._renewal_ms:
            self._renew()
        if self._request is not None:
            return
        if self._next_id is not None:
            producer_id, epoch = self._next_id
            self._next_id = None
            self._deadline_ms = min(self._deadline_ms, now_ms + self._write_timeout_ms)
            self._begin_claim(producer_id, epoch, now_ms)
        elif is_stale:
            return
        elif self._waiting:
            self._begin_batch(_OwnBatch(*self._waiting.pop(0)), now_ms)
        elif self.reader.settled_id != self.producer_id:
            self._deadline_ms = now_ms + self._write_timeout_ms
            self._begin_batch(_OwnBatch(self._record(SETTLED_KEY, now_ms), 1, is_settled=True), now_ms)
        elif self._append is None:
            self._deadline_ms = _NEVER

    def _renew(self) -> None:
        self._renewal = InitProducerId()
        self.actions.append(self._renewal)

    def _is_first_attempt_of_append(self) -> bool:
        batch = self._batch
        is_own = batch is None or batch.is_claim or batch.is_settled
        return self.state is UpstreamState.OWNER and not is_own and self._attempts == 0

    # Ends.

    def _give_up(self, reason: str) -> None:
        self._lose(UpstreamState.UNOWNED, reason)

    def _lose(self, state: UpstreamState, reason: str) -> None:
        """Ends the load, the append, or the ownership."""
        load, append = self._load, self._append
        self._reset(state)
        is_fenced = state is UpstreamState.FENCED
        if load is not None:
            self.actions.append(Fenced(load) if is_fenced else LoadFailed(load, reason))
        elif append is not None:
            self.actions.append(Fenced(append) if is_fenced else Unknown(append, reason))
        else:
            self.actions.append(Lost(reason, is_fenced))

    def _reset(self, state: UpstreamState) -> None:
        self.state = state
        self._load = self._append = None
        self._request = self._batch = self._renewal = self._next_id = None
        self._waiting = []
        self._attempts = 0
        self._retry_ms = self._deadline_ms = _NEVER
        self._renewal_ms = 0
        self._last_error = "no answer"
