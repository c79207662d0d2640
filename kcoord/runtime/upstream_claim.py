# SPDX-License-Identifier: Apache-2.0
"""Who owns the log of a shard in a partition of the upstream: claims, loads, and renewed claims.

Theory of operation
-------------------
Two instances may believe that they own the shard. These rules keep all acknowledged records:

1. A new owner gets a producer id and an epoch that no earlier owner had (InitProducerId with the transactional id of
   the shard). Until the next step, the old owner can still append.
2. It appends a claim: one record, idempotent and not transactional, under the new epoch. From then on the leader of the
   partition rejects every batch of an older epoch with INVALID_PRODUCER_EPOCH.
3. It reads the partition up to its claim, and serves. So it has every batch that the old owner could append.

    UNOWNED      -> INITIALIZING  open
    INITIALIZING -> CLAIMING      the producer id and the epoch are known
    CLAIMING     -> READING       the claim is in the log: `Opened`
    READING      -> OWNER         the log is read up to the claim
    READING      -> WAITING       an earlier owner may have another producer id
    WAITING      -> UNOWNED       that owner has stopped: `Held`, the shard set opens the log once more
    OWNER        -> UNOWNED       an append was given up, or its offset is not the expected one: `Unknown` or `Lost`
    any          -> FENCED        another owner has claimed the log: `Fenced` or `Lost`
    any          -> UNOWNED       close; a load that cannot continue: `LoadFailed`

`kcoord.runtime.upstream_log` describes what an owner does.

A retriable error repeats the request after a backoff that doubles. After `write_timeout_ms` the append or load is given
up: `Unknown` or `LoadFailed`. So too few in-sync replicas or a missing leader delay an append, and nothing is lost.

The producer state of the partition expires after a day without a batch, and the transactional id after a week without
InitProducerId. A partition without producer state fences nobody, and recognizes no repetition. The age of a batch is
that of its largest timestamp, so the timestamps have to be those of the leader (`message.timestamp.type`). The owner
renews its claim, by steps 1 and 2, every `renew_after_ms`. If it has not heard from the partition for so long, an
append waits for the renewal. The renewed claim must have the expected offset too (rule 5 of `upstream_log`), which
proves that there was no other owner meanwhile.

A new producer id does not fence the old one. A takeover gets a new id if the transactional id has expired, or if the
epoch has run out. Then the new owner serves only after `foreign_id_wait_ms`, and after a second claim that it reads up
to. To recognize this also after takeovers in quick succession, the first owner with an id that serves writes a settled
record: owners with earlier ids have stopped. An owner waits if the log has batches of other owners, and no settled
record with its own id. A claim at offset 0 counts as settled, because no other owner was before it. An owner whose
epoch exceeds `LAST_EPOCH` gets a new id itself, before the epoch runs out. It asks for producer ids until the id
changes, and appends under the old id meanwhile.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Final

from kcoord.runtime.shard_log import Append, Load, ProvisionalBatch
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
    Rewrite,
    Unknown,
)
from kcoord.runtime.upstream_batches import NO_CLAIM, Kind, claim_key
from kcoord.runtime.upstream_reader import BatchId, DivergedError, UpstreamReader
from kcoord_protocol.errors import CorruptBatchError, Errors, KafkaError
from kcoord_protocol.record_batch import encode_batch_from_parts

_VERSION: Final = (0).to_bytes(2, "big")
LAST_EPOCH: Final = 30_000
"""With a later epoch an owner changes its producer id. The largest epoch of the protocol is 32,767."""
RENEW_AFTER_MS: Final = 6 * 3_600_000
"""A quarter of the default of `producer.id.expiration.ms`."""
FIRST_RETRY_MS: Final = 20
LONGEST_RETRY_MS: Final = 1_000
NEVER: Final = float("inf")
_DROPPED: Final = "the shard was given up meanwhile"
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
class OwnBatch:
    """A batch that is being produced, with the producer id, epoch and sequence number of the owner or of a client."""

    data: bytes
    count: int
    kind: Kind = Kind.RECORDS
    provisional: ProvisionalBatch | None = None
    """Set if the batch is part of a client's transaction."""
    offset: int = 0
    """The base offset in the append."""
    answered_at: int | None = None
    """The offset in the answer of the upstream."""
    sent_ms: int = 0
    """The time at which the request was made that was answered."""
    seen_at: int | None = None
    """The offset at which the owner has read the batch."""


class UpstreamClaim(ABC):
    """The part of UpstreamLog that the module docstring describes. UpstreamLog has the arguments."""

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
        self.claimed_id = NO_CLAIM
        """The producer id and the epoch of the last claim."""
        self._owner = _VERSION + owner.encode()
        self._write_timeout_ms = write_timeout_ms
        self._foreign_id_wait_ms = foreign_id_wait_ms
        self._renew_after_ms = renew_after_ms
        self.reader = UpstreamReader(0)
        """What this instance knows of the log. Each load begins with a new reader, or with that of the standby."""
        self._waited_id = NO_CLAIM[0]
        """The producer id for which this instance has waited. Owners with earlier ids have stopped."""
        self._reset(UpstreamState.UNOWNED)

    def _reset(self, state: UpstreamState) -> None:
        """Forgets the load, the append and the ownership."""
        self.state = state
        self._request: Request | None = None
        """The request whose answer the load or the append waits for."""
        self._attempts = 0
        self._retry_ms = self._deadline_ms = NEVER
        self._last_error = "no answer"
        self._load: Load | None = None
        self._claim: BatchId | None = None
        """The first claim, up to which the log is read."""
        self._claimed_ms = 0
        self._append: Append | None = None
        self._waiting: list[OwnBatch] = []
        """The batches of the append that were not sent yet."""
        self._batch: OwnBatch | None = None
        """The batch that was sent and has not ended."""
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

    def close(self) -> None:
        """Gives up the claim. Answers that arrive later are ignored."""
        self._reset(UpstreamState.UNOWNED)

    def revoke(self, reason: str) -> None:
        """Ends a load, an append or the ownership, because this instance may not act as the owner any more."""
        if self.state not in (UpstreamState.UNOWNED, UpstreamState.FENCED):
            self._give_up(reason)

    def tick(self, now_ms: int) -> None:
        """Repeats, renews, or gives up what is due. Called at least once a second, and at `retry_ms`."""
        if self._is_dropped:
            self._give_up(_DROPPED)
        elif now_ms >= self._deadline_ms:
            self._give_up(f"gave up after {self._write_timeout_ms} ms: {self._last_error}")
        elif self.state is UpstreamState.WAITING:
            if now_ms >= self._claimed_ms + self._foreign_id_wait_ms:
                load = self._load
                assert load is not None
                self._waited_id = self.claimed_id[0]
                self._reset(UpstreamState.UNOWNED)
                self.actions.append(Held(load))
        elif now_ms >= self._retry_ms:
            self._repeat(now_ms)
        elif self.state is UpstreamState.OWNER:
            self._continue(now_ms)

    @property
    def _is_dropped(self) -> bool:
        return self._load is not None and self._load.is_dropped

    @property
    def retry_ms(self) -> int | None:
        """The time at which the failed request is repeated, None if no request has failed."""
        return int(self._retry_ms) if self._retry_ms < NEVER else None

    # Answers.

    def initialized(self, request: InitProducerId, producer_id: int, epoch: int, now_ms: int) -> None:
        """The upstream returned a producer id and an epoch."""
        if request is self._renewal:
            self._renewal = None
            if producer_id == self.claimed_id[0] and epoch > LAST_EPOCH:
                self._renew()
            else:
                self._next_id = producer_id, epoch
                self._continue(now_ms)
        elif request is self._request and self._is_dropped:
            # A claim would fence the instance that owns the shard now.
            self._give_up(_DROPPED)
        elif request is self._request:
            self._request = None
            self._attempts = 0
            self.state = UpstreamState.CLAIMING
            self._begin_claim((producer_id, epoch), now_ms)

    def _claimed(self, base_offset: int, now_ms: int) -> None:
        """The first claim is in the log."""
        load = self._load
        assert load is not None
        self._batch = None
        self._claim = BatchId(base_offset, base_offset + 1, -1, *self.claimed_id, 0)
        self._claimed_ms = now_ms
        self._deadline_ms = NEVER
        self.state = UpstreamState.READING
        self.reader.distrust()
        self.actions.append(Opened(load, base_offset + 1))

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
            if self._deadline_ms == NEVER:
                self._deadline_ms = now_ms + self._write_timeout_ms
                self._last_error = f"no batches at offset {request.offset}, the claim is at {claim.base_offset}"
            self._send(Fetch(reader.fetch_offset))
            return
        self._deadline_ms = NEVER
        if not is_end:
            self.actions.append(Loaded(load, batches, is_end=False))
        elif reader.has_owner and self.claimed_id[0] not in (reader.settled_id, self._waited_id):
            self.state = UpstreamState.WAITING
        else:
            self.state = UpstreamState.OWNER
            self._load = None
            reader.has_owner = True
            reader.batches.claimed(self.claimed_id)
            self.actions.append(Loaded(load, batches, is_end=True))
            self._rewrite()
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
        if isinstance(request, Produce) and code in _FENCED:
            self._lose(UpstreamState.FENCED, "another instance has claimed the log")
        elif code is Errors.OFFSET_OUT_OF_RANGE and isinstance(request, Fetch):
            self._send(FindStart())
        elif code.retriable:
            self._attempts += 1
            self._retry_ms = now_ms + min(FIRST_RETRY_MS << min(self._attempts - 1, 10), LONGEST_RETRY_MS)
        else:
            self._give_up(f"the upstream refused {type(request).__name__}: {error}")

    # Requests.

    def _send(self, request: Request) -> None:
        self._request = request
        self._retry_ms = NEVER
        self.actions.append(request)

    def _repeat(self, now_ms: int) -> None:
        """Sends the request again that failed: the same bytes, with a new ticket."""
        match self._request:
            case InitProducerId():
                self._send(InitProducerId())
            case Produce(data, _, transactional_id):
                self._send(Produce(data, now_ms, transactional_id))
            case Fetch(offset):
                self._send(Fetch(offset))
            case FindStart():
                self._send(FindStart())

    def _begin_claim(self, claimed_id: tuple[int, int], now_ms: int) -> None:
        self.claimed_id = claimed_id
        self._begin_batch(OwnBatch(self._record(claim_key(claimed_id), now_ms), 1, Kind.CLAIM), now_ms)

    def _record(self, key: bytes, now_ms: int) -> bytes:
        return encode_batch_from_parts([(key, self._owner)], now_ms)

    def _renew(self) -> None:
        self._renewal = InitProducerId()
        self.actions.append(self._renewal)

    def _rewrite(self) -> None:
        """Requests the values of keys of which the log has void records."""
        if self.reader.batches.to_rewrite:
            self.actions.append(Rewrite(frozenset(self.reader.batches.to_rewrite)))

    @abstractmethod
    def _begin_batch(self, batch: OwnBatch, now_ms: int) -> None:
        """Sends a batch."""

    @abstractmethod
    def _continue(self, now_ms: int) -> None:
        """Sends the next batch of an owner."""

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
