# SPDX-License-Identifier: Apache-2.0
"""A client that breaks the protocols: wrong epochs, ids of other members, incomplete dialogues, invalid values.

In its own groups (`RUDE_GROUPS`) it sends anything. In groups of other clients it sends only requests that must not
harm them. It accepts every response that decodes.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Final, TypeAlias

from kcoord.coordinator.group.classic import consumer_protocol
from kcoord.simulation import rude_transactions
from kcoord.simulation.client import Scene, SimulatedClient
from kcoord.simulation.options import RUDE_GROUPS
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import (
    ConsumerGroupDescribeRequest,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    ConsumerProtocolAssignment,
    ConsumerProtocolSubscription,
    DeleteGroupsRequest,
    DescribeGroupsRequest,
    HeartbeatRequest,
    JoinGroupRequest,
    JoinGroupResponse,
    LeaveGroupRequest,
    ListGroupsRequest,
    Message,
    MetadataRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
    SyncGroupRequest,
)

_TOPICS: Final = ("topic-0", "topic-1", "no-topic")
_INSTANCES: Final = ("rude-i0", "rude-i1", "no-instance")
_TIMEOUT_MS: Final = 1_500
_GENEROUS: Final = 0.75
_IMPATIENT: Final = 0.3

Trick: TypeAlias = tuple[ApiKey, int, Message]


class RudeClient(SimulatedClient):
    """Sends one random request per call of `trick`.

    If an earlier response is still to come, it sometimes reconnects first.
    """

    def __init__(
        self,
        number: int,
        groups: list[str],
        scene: Scene,
        members_of: Callable[[str], list[str]],
    ) -> None:
        super().__init__(f"rude-{number}", scene)
        self._groups = groups
        self._members_of = members_of
        self._members: dict[str, list[tuple[str, int]]] = {group_id: [] for group_id in RUDE_GROUPS}
        """Member ids and epochs that responses have given, by group; the last five of each group."""
        self._committed: dict[str, tuple[int, OffsetCommitRequest]] = {}
        """Version and request of the last commit without metadata, by group."""
        self._producer = -1, -1
        self.asked = 0

    def on_timeout(self) -> None:
        """Does nothing: the next disturbance sends another request."""

    def trick(self, seed: int) -> None:
        """Sends one request, drawn from the seed."""
        self.random = Random(seed)
        if self.is_waiting and self.random.random() < _IMPATIENT:
            self.reconnect()
        make = self.random.choice(
            (
                self._join,
                self._join,
                self._sync,
                self._sync,
                self._classic_heartbeat,
                self._leave,
                self._heartbeat,
                self._heartbeat,
                self._heartbeat,
                self._commit,
                self._commit,
                self._commit_again,
                self._commit_again,
                self._fetch,
                self._delete_offsets,
                self._delete_groups,
                self._look,
                self._look_at_topics,
                self._transaction,
                self._transaction,
            )
        )
        group_id = self.random.choice(RUDE_GROUPS) if self.random.random() < _GENEROUS else self._foreign_group()
        if self.random.random() < 0.05:
            group_id = self.random.choice(("g" * 2_000, f"rude-new-{self.random.randrange(100)}"))
        api_key, version, message = make(group_id)
        self.asked += 1
        self.request(
            api_key,
            version,
            group_id,
            message,
            lambda body: self._learn(api_key, version, group_id, body),
            timeout_ms=_TIMEOUT_MS,
        )

    def _foreign_group(self) -> str:
        return self.random.choice((*self._groups, "no-group", ""))

    def _learn(self, api_key: ApiKey, version: int, group_id: str, body: bytes) -> None:
        """Keeps member ids, epochs and producer ids of a response for later requests."""
        if group_id not in self._members:
            return
        if api_key is ApiKey.JOIN_GROUP:
            joined = JoinGroupResponse.decode(body, version)
            if joined.member_id:
                self._remember(group_id, joined.member_id, joined.generation_id)
        elif api_key is ApiKey.CONSUMER_GROUP_HEARTBEAT:
            answer = ConsumerGroupHeartbeatResponse.decode(body, version)
            if not answer.error_code and answer.member_id is not None:
                self._remember(group_id, answer.member_id, answer.member_epoch)
        elif api_key is ApiKey.INIT_PRODUCER_ID:
            self._producer = rude_transactions.producer_of(body) or self._producer

    def _remember(self, group_id: str, member_id: str, epoch: int) -> None:
        self._members[group_id] = [member for member in self._members[group_id] if member[0] != member_id][-4:]
        self._members[group_id].append((member_id, epoch))

    def _member(self, group_id: str) -> tuple[str, int]:
        """Returns a member id and an epoch: of a member, of a member but with a wrong epoch, or of no member."""
        if group_id not in self._members:
            return self.random.choice([*self._members_of(group_id), "nobody"]), 10_000
        if not self._members[group_id] or self.random.random() < 0.15:
            return self.random.choice(("nobody", "")), self.random.choice((-1, 0, 3))
        member_id, epoch = self.random.choice(self._members[group_id])
        return member_id, epoch + self.random.choice((0,) * 12 + (-1, -2, 7))

    def _instance(self) -> str | None:
        return self.random.choice((None, None, None, *_INSTANCES))

    # The classic protocol.

    def _join(self, group_id: str) -> Trick:
        if group_id not in self._members and not group_id.startswith(("rude-new", "ggg")):
            return self._look(group_id)
        random = self.random
        version = random.choice((2, 5, 9))
        member_id, _ = self._member(group_id)
        request = JoinGroupRequest(
            group_id=group_id if random.random() < 0.97 else "",
            member_id=random.choice((member_id, "")),
            session_timeout_ms=random.choice((*(6_000,) * 12, 30_000, 1, 10**9)),
            rebalance_timeout_ms=random.choice((1_000, 1_000, 20_000)),
            protocol_type=random.choice((*("consumer",) * 10, "connect", "")),
            protocols=self._protocols(),
        )
        if version >= 5:
            request.group_instance_id = self._instance()
        return ApiKey.JOIN_GROUP, version, request

    def _protocols(self) -> list[JoinGroupRequest.JoinGroupRequestProtocol]:
        subscription = ConsumerProtocolSubscription(topics=[self.random.choice(_TOPICS)])
        good = b"\x00\x01" + subscription.encode(1)
        names = self.random.choice((["range"], ["range"], ["range"], ["range", "sticky"], ["sticky"], []))
        metadata = self.random.choice((good, good, good, good, good, b"", b"\x00"))
        return [JoinGroupRequest.JoinGroupRequestProtocol(name=name, metadata=metadata) for name in names]

    def _sync(self, group_id: str) -> Trick:
        member_id, generation = self._member(group_id)
        given = ConsumerProtocolAssignment(user_data=self.random.choice((None, b"mine")))
        good = b"\x00\x01" + given.encode(1)
        data = self.random.choice((b"", b"\x00", good, good, consumer_protocol.write_assignment({}, 1)))
        request = SyncGroupRequest(
            group_id=group_id,
            generation_id=generation,
            member_id=member_id,
            group_instance_id=self._instance(),
            protocol_type=self.random.choice((None, "consumer", "consumer", "consumer", "connect", "connect")),
            protocol_name=self.random.choice((None, "range", "range", "range", "sticky", "sticky")),
            assignments=[
                SyncGroupRequest.SyncGroupRequestAssignment(member_id=assigned_id, assignment=data)
                for assigned_id, _ in self._members.get(group_id, [])
            ],
        )
        return ApiKey.SYNC_GROUP, 5, request

    def _classic_heartbeat(self, group_id: str) -> Trick:
        member_id, generation = self._member(group_id)
        instance = self._instance()
        request = HeartbeatRequest(
            group_id=group_id, generation_id=generation, member_id=member_id, group_instance_id=instance
        )
        return ApiKey.HEARTBEAT, 4, request

    def _leave(self, group_id: str) -> Trick:
        if group_id not in self._members:
            group_id = self.random.choice(("no-group", ""))
        members = [
            LeaveGroupRequest.MemberIdentity(member_id=self._member(group_id)[0], group_instance_id=self._instance())
            for _ in range(self.random.randint(0, 2))
        ]
        return ApiKey.LEAVE_GROUP, 4, LeaveGroupRequest(group_id=group_id, members=members)

    # The consumer protocol.

    def _heartbeat(self, group_id: str) -> Trick:
        random = self.random
        if group_id == RUDE_GROUPS[-1] and random.random() < 0.95:
            # The last of its groups mostly stays a classic group.
            return random.choice((self._join, self._sync, self._commit))(group_id)
        member_id, epoch = self._member(group_id)
        is_own = group_id in self._members or group_id.startswith(("rude-new", "ggg"))
        if is_own and random.random() < 0.4:
            epoch, member_id = 0, member_id or f"rude-member-{random.randint(0, 6)}"
        request = ConsumerGroupHeartbeatRequest(
            group_id=group_id,
            member_id=member_id if random.random() < 0.9 else f"rude-member-{random.randint(0, 6)}",
            member_epoch=random.choice((epoch,) * 12 + (-1, -2, -3)) if is_own else epoch,
            instance_id=self._instance(),
            rebalance_timeout_ms=random.choice((1_000, 1_000, 1_000, -1)),
            subscribed_topic_names=random.choice((["topic-0"], ["topic-0", "topic-1"], ["topic-1"], [], None)),
            topic_partitions=random.choice(([], [], [], None)),
        )
        version = random.choice((0, 1, 2))
        if version and random.random() < 0.25:
            request.subscribed_topic_regex = random.choice(("", "topic-.*", "topic-1", "(", "no.*"))
        if random.random() < 0.02:
            request.member_id = "m" * 2_000
        if random.random() < 0.1:
            request.server_assignor = random.choice(("range", "uniform", "sticky"))
        if random.random() < 0.05:
            request.rack_id = random.choice(("", "rack"))
        if not is_own and not request.member_id.startswith("nobody"):
            request.member_epoch = 10_000
        return ApiKey.CONSUMER_GROUP_HEARTBEAT, version, request

    # Offsets.

    def _commit(self, group_id: str) -> Trick:
        random = self.random
        member_id, epoch = self._member(group_id)
        if group_id in self._members and random.random() < 0.3:
            member_id, epoch = "", -1
        elif random.random() < 0.1:
            epoch = -1
        version = random.choice((3, 8, 9))
        is_large = random.random() < 0.03
        metadata = "x" * 4_000 if is_large else random.choice(("", "", "", "x" * 5_000))
        partitions = [
            OffsetCommitRequest.OffsetCommitRequestPartition(
                partition_index=number, committed_offset=number, committed_metadata=metadata
            )
            for number in range(300 if is_large else random.randint(1, 3))
        ]
        topic = OffsetCommitRequest.OffsetCommitRequestTopic(name=random.choice(_TOPICS), partitions=partitions)
        if group_id not in self._members and (epoch < 0 or (member_id == "nobody" and not self._members_of(group_id))):
            epoch = 10_000
        request = OffsetCommitRequest(
            group_id=group_id, generation_id_or_member_epoch=epoch, member_id=member_id, topics=[topic]
        )
        if version >= 7:
            request.group_instance_id = self._instance()
        if group_id in self._members and version >= 8 and not metadata:
            self._committed[group_id] = version, request
        return ApiKey.OFFSET_COMMIT, version, request

    def _commit_again(self, group_id: str) -> Trick:
        """Repeats the last commit of the group, even if its member has left or was fenced meanwhile."""
        if group_id not in self._committed:
            return self._commit(group_id)
        version, request = self._committed[group_id]
        return ApiKey.OFFSET_COMMIT, version, request

    def _fetch(self, group_id: str) -> Trick:
        member_id, epoch = self._member(group_id)
        group = OffsetFetchRequest.OffsetFetchRequestGroup(
            group_id=group_id,
            member_id=self.random.choice((None, member_id)),
            member_epoch=self.random.choice((-1, epoch)),
            topics=[
                OffsetFetchRequest.OffsetFetchRequestTopics(name=name, partition_indexes=[0, 1, 77]) for name in _TOPICS
            ],
        )
        request = OffsetFetchRequest(groups=[group], require_stable=self.random.random() < 0.5)
        return ApiKey.OFFSET_FETCH, 9, request

    def _delete_offsets(self, group_id: str) -> Trick:
        topics = [
            OffsetDeleteRequest.OffsetDeleteRequestTopic(
                name=name,
                partitions=[
                    OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=number) for number in (0, 1, 99)
                ],
            )
            for name in _TOPICS
        ]
        return ApiKey.OFFSET_DELETE, 0, OffsetDeleteRequest(group_id=group_id, topics=topics)

    # Deletions of groups, and requests that only read.

    def _delete_groups(self, group_id: str) -> Trick:
        names = [group_id] if group_id in self._members else ["no-group", *self._members_of(group_id)[:0]]
        return ApiKey.DELETE_GROUPS, 2, DeleteGroupsRequest(groups_names=names)

    def _look(self, group_id: str) -> Trick:
        states = self.random.choice(([], ["Stable"], ["Empty", "empty"]))
        return self.random.choice(
            (
                (ApiKey.LIST_GROUPS, 5, ListGroupsRequest(states_filter=states, types_filter=[])),
                (ApiKey.CONSUMER_GROUP_DESCRIBE, 1, ConsumerGroupDescribeRequest(group_ids=[group_id, "", "no-group"])),
                (ApiKey.DESCRIBE_GROUPS, 6, DescribeGroupsRequest(groups=[group_id, "no-group"])),
                (ApiKey.DESCRIBE_GROUPS, 5, DescribeGroupsRequest(groups=[group_id, ""])),
            )
        )

    def _look_at_topics(self, group_id: str) -> Trick:
        names = self.random.choice((["topic-0", "no-topic"], ["bad name"], [None], ["topic-1"]))
        topic_id = self.random.choice((bytes(16), b"\7" * 16))
        version = self.random.choice((9, 10, 12, 12))
        topics = [
            MetadataRequest.MetadataRequestTopic(name=name if name is not None or version >= 10 else "")
            for name in names
        ]
        if version >= 10:
            topics[0].topic_id = topic_id
        return ApiKey.METADATA, version, MetadataRequest(topics=topics)

    def _transaction(self, group_id: str) -> Trick:
        if group_id not in self._members:
            group_id = self.random.choice(RUDE_GROUPS)
        member_id, epoch = self._member(group_id)
        return rude_transactions.trick(self.random, group_id, member_id, epoch, self._producer)
