# SPDX-License-Identifier: Apache-2.0
"""The log of one shard in a partition of another Kafka cluster, the upstream: the requests and what the answers mean.

Theory of operation
-------------------
An `UpstreamLog` has no clock and does no IO. Its caller passes in the requests of the shard set
(`kcoord.runtime.shard_log`), the answers of the upstream, and the time. After each call it takes the `actions`:
requests to send to the upstream, and outcomes for the shard set. A request is its own ticket. The answer of a request
that the log does not wait for any more is ignored.

`kcoord.runtime.upstream_claim` has rules 1 to 3: how an instance becomes the owner. An owner has one batch in flight,
and follows its partition: it reads all batches that are appended (`followed`).

4. An append is one batch with the owner's epoch and the next sequence number. If the outcome is unknown, the same bytes
   are sent again until it is known. The leader recognizes the repetition, and returns the offset of the first copy.
5. An append counts only if its batch has exactly the offset at which the owner expects it: after all batches that the
   owner has written or read. Otherwise there is a batch that the owner did not write, the log was truncated, or the
   answer belongs to another batch. Then the owner gives the shard up, acknowledges nothing, and begins again at step 1.
   If the offset is higher, the owner first reads the batches before it. Only markers and transactional batches may be
   there.

Transactions. Offsets that a client commits in a transaction are in a batch with the producer id and the epoch of the
client, and the next sequence number of that producer in this partition. The leader checks that the partition is part of
the transaction. The transaction coordinator of the upstream writes the marker, and the owner passes it on (`Ended`).
Claims do not fence transactional batches, so an earlier owner may still append one. `kcoord.runtime.upstream_batches`
says which batches count. These rules keep a batch of an earlier owner from counting:

6. A transactional batch is in the log when the owner has read it back. If another batch is at the offset of the answer,
   the leader took the batch for a repetition of that one. Then it is refused, and the client commits again.
7. A batch of an earlier owner is void: a header of each record names the claim of its writer. After its transaction is
   committed, the owner writes the present values of its keys again (`Rewrite`).
8. A batch belongs to the transaction in which the client sent it. The client may have given that up and begun the next
   one, with the same epoch. When the owner reads a marker of the client, all batches of the client that are not in the
   log yet are refused. A batch that was sent already is void if it arrives after the marker, by the same header.
9. A transactional batch that was refused is not in the log. An attempt with an unknown outcome may arrive there all the
   same. Then the owner gives the shard up, because its state is without that batch.

The upstream may refuse a transactional batch because of its transaction or its producer. That does not end the append:
the outcome of the batch is `Decided`, and the next batch follows. If the leader cannot ask the transaction coordinator
about the first attempt, or if the transaction is just ending, the batch is refused, too. The client commits again, and
other clients do not wait for its transaction.
"""

from __future__ import annotations

from typing import Final

from kcoord.runtime.shard_log import Append
from kcoord.runtime.upstream_actions import Decided, Ended, Fenced, Produce, Request, Unknown, Written
from kcoord.runtime.upstream_batches import (
    MAX_SEQUENCE,
    SETTLED_KEY,
    Kind,
    ReadBatch,
    claim_key,
    claim_of,
    with_writer,
)
from kcoord.runtime.upstream_claim import (
    LAST_EPOCH,
    NEVER,
    OwnBatch,
    UpstreamClaim,
    UpstreamState,
)
from kcoord.runtime.upstream_reader import BatchId, DivergedError
from kcoord_protocol.batch_header import stamp_producer
from kcoord_protocol.errors import CorruptBatchError, Errors, KafkaError
from kcoord_protocol.record_batch import decode_entries, decode_header, encode_batch_from_parts, walk_batches

_NOT_VERIFIED: Final = frozenset(
    {
        Errors.NOT_ENOUGH_REPLICAS,
        Errors.CONCURRENT_TRANSACTIONS,
        Errors.COORDINATOR_LOAD_IN_PROGRESS,
        Errors.COORDINATOR_NOT_AVAILABLE,
        Errors.NOT_COORDINATOR,
    }
)
"""The leader could not ask the transaction coordinator about a batch, and has not appended it.

Apache Kafka returns NOT_ENOUGH_REPLICAS to old versions of Produce.
"""


class UpstreamLog(UpstreamClaim):
    """One shard's log. The module docstring describes who calls what.

    `owner` is stored in each claim, for people who read the log. `write_timeout_ms`: the time after which an
    append or a step of a load is given up. `foreign_id_wait_ms`: the time after which an owner with another producer id
    surely appends nothing any more.
    """

    def _reset(self, state: UpstreamState) -> None:
        super()._reset(state)
        self._sequence = 0

    # Called for the shard set.

    def append(self, append: Append, now_ms: int) -> None:
        """Appends batches. The outcome is `Written`, `Unknown` or `Fenced`.

        Batches with a transactional id get an outcome of their own before: `Decided`.
        """
        if self.state is not UpstreamState.OWNER:
            is_fenced = self.state is UpstreamState.FENCED
            self.actions.append(Fenced(append) if is_fenced else Unknown(append, "the log is not claimed"))
            return
        self._append = append
        for position, fields in walk_batches(append.data):
            offset, length, *_, count = fields
            data = append.data[position : position + 12 + length]
            self._waiting.append(OwnBatch(data, count, provisional=append.provisional.get(offset), offset=offset))
        self._deadline_ms = now_ms + self._write_timeout_ms
        self._continue(now_ms)

    def may_send(self, request: Produce, now_ms: int) -> bool:
        """True if the request still makes sense: the log waits for it, and its time is not over."""
        return request is self._request and now_ms < self._deadline_ms and not self._is_dropped

    # Answers.

    def produced(self, request: Produce, base_offset: int, now_ms: int) -> None:
        """The upstream has the batch at `base_offset`, on all in-sync replicas."""
        if request is not self._request:
            return
        batch = self._batch
        assert batch is not None
        self._request = None
        self._attempts = 0
        if self.state is UpstreamState.CLAIMING:
            self._heard_ms = request.created_ms
            self._sequence = 1
            self._claimed(base_offset, now_ms)
            return
        batch.answered_at, batch.sent_ms = base_offset, request.created_ms
        self._end_batch(now_ms)

    def refused(self, request: Request, error: KafkaError, now_ms: int) -> None:
        """The upstream rejected a request, or its outcome is unknown."""
        code, batch = error.error, self._batch
        if request is not self._request or batch is None or self.state is not UpstreamState.OWNER:
            super().refused(request, error, now_ms)
        elif batch.provisional is not None:
            is_unverified = self._attempts == 0 and code in _NOT_VERIFIED
            if code.retriable and not is_unverified:
                super().refused(request, error, now_ms)
                return
            if is_unverified:
                error = KafkaError(Errors.COORDINATOR_LOAD_IN_PROGRESS, f"the transaction was not verified: {error}")
            self._decide(None if batch.seen_at is not None else error, now_ms)
        elif code is Errors.UNKNOWN_PRODUCER_ID and self._attempts == 0 and batch.kind is Kind.RECORDS:
            # An old broker has dropped the producer state. The batch was not appended and can follow a renewed claim.
            self._waiting.insert(0, batch)
            self._request = self._batch = None
            self._heard_ms = now_ms - self._renew_after_ms
            self._continue(now_ms)
        else:
            super().refused(request, error, now_ms)

    # The partition.

    @property
    def is_following(self) -> bool:
        """True if the owner takes the next batches of the partition."""
        return self.state is UpstreamState.OWNER

    @property
    def is_in_a_hurry(self) -> bool:
        """True if something waits for the next batches: a batch in flight, or the marker of a transaction."""
        batch = self._batch
        is_waiting = batch is not None and (batch.provisional is not None or batch.answered_at is not None)
        return self.is_following and (is_waiting or bool(self.reader.batches.open))

    def followed(self, data: bytes, now_ms: int) -> None:
        """Reads batches of the owned partition. The first ones may be before `position`, the last one cut off."""
        if not self.is_following:
            return
        has_marker = False
        expected = self.reader.position
        try:
            for read in self.reader.read(data, now_ms):
                if read.header.base_offset > expected:
                    self._give_up(f"the log does not have the offsets from {expected} to {read.header.base_offset}")
                    return
                expected = self.reader.position
                has_marker |= read.kind is Kind.MARKER
                self._follow(read, now_ms)
                if self.state is not UpstreamState.OWNER:
                    return
        except CorruptBatchError as error:
            self._give_up(f"a fetched batch is corrupt: {error}")
            return
        except DivergedError as error:
            self._give_up(str(error))
            return
        self._end_batch(now_ms)
        if has_marker:
            self._rewrite()

    def not_followed(self, error: KafkaError) -> None:
        """The upstream rejected the request for the next batches of the owned partition."""
        if not self.is_following:
            return
        if error.error is Errors.OFFSET_OUT_OF_RANGE:
            self._give_up(f"the log does not have offset {self.reader.fetch_offset} any more: {error}")
        else:
            self.reader.distrust()

    def _follow(self, read: ReadBatch, now_ms: int) -> None:
        """Handles a batch of the owned partition."""
        batch, offset = self._batch, read.header.base_offset
        if read.kind is Kind.MARKER:
            self._decide_before_marker(read.producer.producer_id, now_ms)
            committed, coordinator_epoch = read.marker()
            self.actions.append(Ended(read.producer, coordinator_epoch, committed))
        elif batch is not None and _is_same(batch, read):
            batch.seen_at = offset
            if batch.provisional is not None:
                self._end_batch(now_ms)
        elif read.kind is Kind.CLAIM and not self._is_overtaken(read):
            self._lose(UpstreamState.FENCED, "another instance has claimed the log")
        elif read.kind is Kind.TRANSACTIONAL:
            self._give_up(f"the log has a batch at offset {offset} that was refused")
        elif read.kind is not Kind.VOID and not read.header.is_control:
            self._give_up(f"the log has a batch of another writer at offset {offset}")

    def _decide_before_marker(self, producer_id: int, now_ms: int) -> None:
        """Refuses the batches of a client that are not in the log, since the client's transaction has ended."""
        for waiting in self._waiting:
            if waiting.provisional is not None and decode_header(waiting.data).producer_id == producer_id:
                waiting.provisional.is_stale = True
        batch = self._batch
        if batch is not None and batch.provisional is not None and decode_header(batch.data).producer_id == producer_id:
            self._decide(None if batch.seen_at is not None else _stale(), now_ms)

    def _is_overtaken(self, claim: ReadBatch) -> bool:
        """Returns whether the claim of another instance was before the owner's renewed claim."""
        producer_id, epoch = claim.producer
        return producer_id == self.claimed_id[0] and epoch < self.claimed_id[1]

    # Batches of the owner.

    def _begin_batch(self, batch: OwnBatch, now_ms: int) -> None:
        provisional = batch.provisional
        if provisional is None:
            batch.data = stamp_producer(batch.data, *self.claimed_id, self._sequence)
        else:
            header = decode_header(batch.data)
            sequence = self.reader.batches.next_sequence(header.producer_id, header.producer_epoch)
            batch.data = with_writer(batch.data, self.claimed_id, self.reader.position, sequence)
        self._batch = batch
        if provisional is not None and provisional.is_stale:
            self._decide(_stale(), now_ms)
        else:
            self._send(Produce(batch.data, now_ms, provisional.transactional_id if provisional else None))

    def _continue(self, now_ms: int) -> None:
        """Sends the next batch of an owner: a renewed claim, the next one of the append, or a settled record."""
        if self.state is not UpstreamState.OWNER:
            return
        is_stale = now_ms - self._heard_ms >= self._renew_after_ms
        is_due = is_stale or now_ms - self._claimed_ms >= self._renew_after_ms or self.claimed_id[1] > LAST_EPOCH
        if is_due and self._renewal is None and self._next_id is None and now_ms >= self._renewal_ms:
            self._renew()
        if self._batch is not None:
            return
        if self._next_id is not None:
            claimed_id, self._next_id = self._next_id, None
            self._deadline_ms = min(self._deadline_ms, now_ms + self._write_timeout_ms)
            self._sequence = 0
            self._begin_claim(claimed_id, now_ms)
        elif is_stale:
            return
        elif self._waiting:
            self._begin_batch(self._waiting.pop(0), now_ms)
        elif self.reader.settled_id != self.claimed_id[0]:
            self._deadline_ms = now_ms + self._write_timeout_ms
            self._begin_batch(OwnBatch(self._record(SETTLED_KEY, now_ms), 1, Kind.SETTLED), now_ms)
        elif (claim := self.reader.batches.to_delete) is not None:
            self._deadline_ms = now_ms + self._write_timeout_ms
            tombstone = encode_batch_from_parts([(claim_key(claim), None)], now_ms)
            self._begin_batch(OwnBatch(tombstone, 1, Kind.DELETED_CLAIM), now_ms)
        elif self._append is None:
            self._deadline_ms = NEVER

    def _end_batch(self, now_ms: int) -> None:
        """Ends the batch in flight, if it has an answer and the partition is read up to there."""
        batch, position = self._batch, self.reader.position
        if batch is None or batch.answered_at is None:
            return
        offset = batch.answered_at
        if batch.provisional is not None:
            if batch.seen_at is not None:
                self._decide(None, now_ms)
            elif position > offset:
                text = f"the upstream has the batch of another writer at offset {offset}"
                self._decide(KafkaError(Errors.COORDINATOR_NOT_AVAILABLE, text), now_ms)
            return
        if batch.seen_at is None and position == offset:
            self.reader.appended(BatchId(offset, offset + batch.count, -1, *self.claimed_id, self._sequence))
            self.reader.batches.written(batch.data)
        elif batch.seen_at is None and position < offset:
            return
        elif batch.seen_at != offset:
            self._give_up(
                f"the batch is at offset {offset} and not at {position}, "
                "so the log has batches of others, or has lost some"
            )
            return
        self._batch = None
        self._heard_ms = batch.sent_ms
        self._sequence = (self._sequence + batch.count) & MAX_SEQUENCE
        if batch.kind is Kind.CLAIM:
            self._claimed_ms = now_ms
            self.reader.batches.claimed(self.claimed_id)
        elif batch.kind is Kind.SETTLED:
            self.reader.settled_id = self.claimed_id[0]
        elif batch.kind is Kind.DELETED_CLAIM:
            self.reader.batches.deleted(claim_of(decode_entries(batch.data)[0][1] or b""))
        else:
            self._end_append()
        self._continue(now_ms)

    def _decide(self, error: KafkaError | None, now_ms: int) -> None:
        """Ends the transactional batch in flight: it is in the log, or was refused."""
        batch, append = self._batch, self._append
        assert batch is not None and append is not None
        self._batch = self._request = None
        self._attempts = 0
        self._retry_ms = NEVER
        self.actions.append(Decided(append, batch.offset, error))
        if error is not None:
            # A refused commit keeps no value from being restored any more.
            self._rewrite()
        self._end_append()
        self._continue(now_ms)

    def _end_append(self) -> None:
        append = self._append
        if append is not None and not self._waiting:
            self._append = None
            self._deadline_ms = NEVER
            self.actions.append(Written(append))


def _stale() -> KafkaError:
    """Returns the error for a batch of a transaction that has ended. If its client is in the next one, it retries."""
    return KafkaError(Errors.COORDINATOR_LOAD_IN_PROGRESS, "a transaction of the producer has ended meanwhile")


def _is_same(batch: OwnBatch, read: ReadBatch) -> bool:
    """Returns whether the batch that was read is the one that was sent. Its leader sets offset, epoch and time."""
    sent, header = decode_header(batch.data), read.header
    is_transactional = batch.provisional is not None
    if is_transactional is not (read.kind is Kind.TRANSACTIONAL) or read.header.is_control:
        return False
    names = sent.producer_id, sent.producer_epoch, sent.base_sequence
    if names != (header.producer_id, header.producer_epoch, header.base_sequence):
        return False
    # Only one owner writes under a claim. Of a client's batches, one that was refused may have the same number.
    return not is_transactional or _content(batch.data) == _content(read.data)


def _content(data: bytes) -> list[tuple[bytes | None, bytes | None]]:
    return [(key, value) for _, key, value in decode_entries(data)]
