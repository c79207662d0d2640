# SPDX-License-Identifier: Apache-2.0
"""Committed offsets of a shard's groups: commit, fetch, delete and expire them, within transactions or without.

One method per operation, each from state and request to a CoordinatorResult; those named `packed` are the short cuts
of `packed_commit` and `packed_fetch`, and `*_verification` is soft state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.counters import GroupCounters
from kcoord.coordinator.group.offsets import operations as offset_operations
from kcoord.coordinator.group.offsets.expiration import MAX_TOMBSTONES, Expiration
from kcoord.coordinator.group.offsets.packed_commit import CommitPlan
from kcoord.coordinator.group.offsets.packed_fetch import PackedFetch
from kcoord.coordinator.group.shard_state import ShardState
from kcoord.coordinator.group.timers import OFFSETS_EXPIRATION
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.result import (
    CoordinatorResult,
    OperationContext,
    Producer,
    Schedule,
    new_end_transaction_marker,
)
from kcoord.runtime.verification import Verifications
from kcoord_protocol.errors import Errors, KafkaError

if TYPE_CHECKING:
    from kcoord_protocol.messages import (
        OffsetCommitRequest,
        OffsetCommitResponse,
        OffsetDeleteRequest,
        OffsetDeleteResponse,
        OffsetFetchRequest,
        OffsetFetchResponse,
        TxnOffsetCommitRequest,
        TxnOffsetCommitResponse,
    )


class ShardOffsets(ShardState):
    """The operations on offsets."""

    def __init__(self, config: BrokerConfig, image: MetadataImage, counters: GroupCounters | None = None) -> None:
        super().__init__(config, image, counters)
        self._verifications = Verifications()
        self.clock_gain_ms = 0
        """Soft: by how much the clock may have run too fast. Nothing expires early by it (KIP-211)."""

    def commit_offset(
        self, context: OperationContext, request: OffsetCommitRequest
    ) -> CoordinatorResult[OffsetCommitResponse]:
        group = self._present_or_admitted(request.group_id)
        return offset_operations.commit_offset(self._config, self._image, group, context, request)

    def has_group(self, group_id: str) -> bool:
        return group_id in self._groups

    def commit_packed(self, plan: CommitPlan, cells: Sequence[bytes], now_ms: int) -> bool:
        """As `commit_offset` for a request whose plan is known, which then stands for the result; False where that has
        to be asked.
        """
        if self._pending.open:
            return False
        return plan.prepare(self._groups, self._offsets, self._image, cells, now_ms)

    def fetch_packed(self, fetch: PackedFetch, require_stable: bool) -> bytes | None:
        """As `fetch_offsets`, encoded; None where that has to be asked."""
        if require_stable and self._pending.open:
            return None
        return fetch.encode(self._groups.get(fetch.group_id), self._offsets, self._image)

    def fetch_offsets(
        self, context: OperationContext, request: OffsetFetchRequest.OffsetFetchRequestGroup, require_stable: bool
    ) -> CoordinatorResult[OffsetFetchResponse.OffsetFetchResponseGroup]:
        group = self._groups.get(request.group_id)
        pending = self._pending if require_stable else None
        return CoordinatorResult(offset_operations.fetch_offsets(group, self._offsets, pending, request))

    def delete_offsets(
        self, context: OperationContext, request: OffsetDeleteRequest
    ) -> CoordinatorResult[OffsetDeleteResponse]:
        group = self._groups.get(request.group_id)
        return offset_operations.delete_offsets(self._image, group, self._offsets, self._pending, request)

    # Within transactions.

    def start_verification(self, producer: Producer) -> int | None:
        """A ticket for a producer whose first commit of a transaction has to be agreed with the transaction
        coordinator; None where its transaction is open in this log. Soft state, so no operation.
        """
        if self._pending.epoch_of(producer.producer_id) == producer.producer_epoch:
            return None
        return self._verifications.start(producer.producer_id)

    def finish_verification(self, producer: Producer, ticket: int) -> None:
        self._verifications.finish(producer.producer_id, ticket)

    def commit_transactional_offsets(
        self, context: OperationContext, request: TxnOffsetCommitRequest, ticket: int | None
    ) -> CoordinatorResult[TxnOffsetCommitResponse]:
        """The offsets are pending until `end_transaction`."""
        epoch = self._pending.epoch_of(request.producer_id)
        if epoch is not None and request.producer_epoch < epoch:
            raise KafkaError(Errors.INVALID_PRODUCER_EPOCH, f"Producer {request.producer_id} is at epoch {epoch}.")
        agreed = ticket is not None and self._verifications.holds(request.producer_id, ticket)
        if epoch != request.producer_epoch and not agreed:
            raise KafkaError(
                Errors.INVALID_TXN_STATE, f"Producer {request.producer_id} has no transaction under way here."
            )
        group = self._present_or_admitted(request.group_id)
        return offset_operations.commit_transactional_offsets(self._config, self._image, group, context, request)

    def end_transaction(
        self, context: OperationContext, producer: Producer, coordinator_epoch: int, *, committed: bool
    ) -> CoordinatorResult[None]:
        """The marker makes pending offsets count, or drops them. Nothing is written where nothing is open."""
        epoch = self._pending.epoch_of(producer.producer_id)
        if epoch is not None and producer.producer_epoch < epoch:
            raise KafkaError(Errors.INVALID_PRODUCER_EPOCH, f"Producer {producer.producer_id} is at epoch {epoch}.")
        self._verifications.end(producer.producer_id)
        if epoch is None:
            return CoordinatorResult(None)
        return CoordinatorResult(None, [new_end_transaction_marker(producer, coordinator_epoch, committed=committed)])

    # Time.

    def expire_offsets(self, context: OperationContext) -> CoordinatorResult[None]:
        """KIP-211: what has expired goes, and with its last offset an empty group; a long list goes in portions."""
        expiration = Expiration(self._config, self._image, context.now_ms, self.clock_gain_ms)
        result = CoordinatorResult(None)
        for group in self._groups.values():
            result.records += self._deletion.of_expired(expiration, group)
            if len(result.records) >= MAX_TOMBSTONES:
                result.timers.append(Schedule(OFFSETS_EXPIRATION, context.now_ms))
                return result
        result.timers.append(self._next_expiration(context))
        return result

    def _next_expiration(self, context: OperationContext) -> Schedule:
        return Schedule(OFFSETS_EXPIRATION, context.now_ms + self._config.offsets_retention_check_interval_ms)
