# SPDX-License-Identifier: Apache-2.0
"""Commits and fetches the group's offsets.

Both requests name the member and its epoch, so that the coordinator rejects a member that is no longer in the group.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

from kcoord.client.cluster import Cluster, CoordinatorType, Deadline
from kcoord.client.consumer.membership import Membership
from kcoord.client.errors import (
    CommitFailedException,
    StaleMemberEpochException,
    TimeoutException,
    UnknownTopicException,
)
from kcoord.client.offset_messages import (
    LAST_VERSION_WITH_NAMES,
    GroupOffsets,
    by_topic,
    commit_error_codes,
    commit_topics,
    fetched_offsets,
)
from kcoord.client.results import error_of
from kcoord.client.types import ConsumerGroupMetadata, Offsets, TopicPartition
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)

# From v8 on OffsetFetch has a list of groups. From v9 on both requests name a member and its epoch.
_FIRST_FETCH_VERSION: Final = 8
_FIRST_MEMBER_VERSION: Final = 9
_NOT_A_MEMBER: Final = frozenset(
    {Errors.UNKNOWN_MEMBER_ID, Errors.FENCED_INSTANCE_ID, Errors.ILLEGAL_GENERATION, Errors.FENCED_MEMBER_EPOCH}
)


class GroupOffsetsClient:
    """Commits and fetches offsets of one group.

    Commits are sent one after the other, in the order of the calls. An older commit cannot overwrite a newer one.
    """

    def __init__(self, cluster: Cluster, group_id: str, membership: Membership) -> None:
        self._cluster = cluster
        self._group_id = group_id
        self._membership = membership
        self._order = asyncio.Lock()

    def group_metadata(self) -> ConsumerGroupMetadata:
        """Returns the member that commits now. If the consumer is not a member, the member id is empty."""
        member = self._membership
        if not member.may_commit:
            return ConsumerGroupMetadata(self._group_id, group_instance_id=member.instance_id)
        return ConsumerGroupMetadata(self._group_id, member.member_id, member.member_epoch, member.instance_id)

    def metadata_for_transaction(self, *, as_member: bool) -> ConsumerGroupMetadata:
        """Returns what names the consumer in the request of a producer that commits its offsets.

        A member that was fenced or has left keeps its id and its last epoch, so the coordinator rejects the offsets.
        Without them it would accept them as soon as the group is empty, although another member may have processed the
        same records.
        """
        member = self._membership
        if not as_member or member.may_commit or not member.last_epoch:
            return self.group_metadata()
        return ConsumerGroupMetadata(self._group_id, member.member_id, member.last_epoch, member.instance_id)

    async def commit(self, offsets: Offsets, deadline: Deadline, *, as_member: bool) -> None:
        """Commits offsets, and retries retriable errors until the deadline.

        STALE_MEMBER_EPOCH is retried, too: the next heartbeat gives the member its new epoch.
        """
        if not offsets:
            return
        try:
            async with asyncio.timeout(max(deadline.left_ms(), 0) / 1000):
                await self._order.acquire()
        except TimeoutError:
            raise TimeoutException("commit offsets: an earlier commit has no outcome yet") from None
        try:
            await self._cluster.retry("commit offsets", deadline, lambda: self._commit(offsets, as_member))
        finally:
            self._order.release()

    async def _commit(self, offsets: Offsets, as_member: bool) -> None:
        member = self.group_metadata()
        if as_member and not member.member_id:
            raise CommitFailedException(f"the consumer is not a member of group {self._group_id} any more")
        request = OffsetCommitRequest(
            group_id=self._group_id,
            generation_id_or_member_epoch=member.member_epoch,
            member_id=member.member_id,
            group_instance_id=member.group_instance_id if member.member_id else None,
            topics=commit_topics(offsets),
        )
        response = await self._cluster.call_coordinator(
            CoordinatorType.GROUP,
            self._group_id,
            request,
            OffsetCommitResponse,
            commit_error_codes,
            lowest=_FIRST_MEMBER_VERSION if member.member_id else 0,
            highest=LAST_VERSION_WITH_NAMES,
        )
        for topic in response.topics:
            for partition in topic.partitions:
                if partition.error_code:
                    raise self._commit_error(
                        partition.error_code, TopicPartition(topic.name, partition.partition_index)
                    )

    def _commit_error(self, code: int, partition: TopicPartition) -> Exception:
        error = error_of(code)
        if error in _NOT_A_MEMBER:
            return CommitFailedException(f"group {self._group_id} rejected the commit of {partition}: {error.name}")
        if error is Errors.STALE_MEMBER_EPOCH:
            return StaleMemberEpochException(f"commit of {partition}: the member's epoch is stale")
        if error is Errors.UNKNOWN_TOPIC_OR_PARTITION:
            # The coordinator knows all topics, so this topic was deleted. A rebalance must not wait for its commit.
            return UnknownTopicException(f"group {self._group_id} cannot commit {partition}: the topic does not exist")
        return KafkaError(error, str(partition))

    async def fetch(
        self, partitions: Collection[TopicPartition], deadline: Deadline, *, require_stable: bool = True
    ) -> GroupOffsets:
        """Returns the committed offset of each partition, None if there is none."""
        return await self._cluster.retry(
            "fetch committed offsets", deadline, lambda: self._fetch(partitions, require_stable)
        )

    async def _fetch(self, partitions: Collection[TopicPartition], require_stable: bool) -> GroupOffsets:
        member = self.group_metadata()
        group = OffsetFetchRequest.OffsetFetchRequestGroup(
            group_id=self._group_id,
            topics=[
                OffsetFetchRequest.OffsetFetchRequestTopics(name=name, partition_indexes=indexes)
                for name, indexes in by_topic(partitions).items()
            ],
        )
        if member.member_id:
            group.member_id, group.member_epoch = member.member_id, member.member_epoch
        response = await self._cluster.call_coordinator(
            CoordinatorType.GROUP,
            self._group_id,
            OffsetFetchRequest(groups=[group], require_stable=require_stable),
            OffsetFetchResponse,
            lambda answer: [group.error_code for group in answer.groups],
            lowest=_FIRST_FETCH_VERSION,
            highest=LAST_VERSION_WITH_NAMES,
        )
        (answer,) = response.groups
        offsets = fetched_offsets(answer)
        if isinstance(offsets, KafkaError):
            if offsets.error in (Errors.STALE_MEMBER_EPOCH, Errors.UNKNOWN_MEMBER_ID):
                raise StaleMemberEpochException(f"group {self._group_id}: {offsets}")
            raise offsets
        return {partition: offsets.get(partition) for partition in partitions}
