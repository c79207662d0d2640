# SPDX-License-Identifier: Apache-2.0
"""Models of guests: clients whose rights change while they send requests.

They accept every error. Whether a response follows the ACLs is decided by `rights_checks`, for each response.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeAlias

from kcoord.simulation.client import RETRY_MS, Scene, SimulatedClient
from kcoord.simulation.ledger import Place
from kcoord.simulation.options import COMMITTER_GROUP, GUEST_GROUPS, GUEST_MEMBER_GROUPS
from kcoord.simulation.principals import GUEST_TOPIC, GUESTS, SECRET_TOPIC
from kcoord.simulation.promises import Promises
from kcoord.simulation.record_producer import produce_request
from kcoord.simulation.topics import FIRST_TOPIC, LATER_TOPIC
from kcoord_protocol.acls import AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import (
    AddOffsetsToTxnRequest,
    AlterClientQuotasRequest,
    ConsumerGroupDescribeRequest,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    CreateAclsRequest,
    DeleteAclsRequest,
    DeleteGroupsRequest,
    DescribeAclsRequest,
    DescribeClusterRequest,
    DescribeGroupsRequest,
    DescribeTopicPartitionsRequest,
    DescribeTransactionsRequest,
    EndTxnRequest,
    FetchRequest,
    FindCoordinatorRequest,
    HeartbeatRequest,
    InitProducerIdRequest,
    InitProducerIdResponse,
    JoinGroupRequest,
    LeaveGroupRequest,
    ListGroupsRequest,
    ListOffsetsRequest,
    Message,
    MetadataRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetFetchRequest,
    SyncGroupRequest,
    TxnOffsetCommitRequest,
)
from kcoord_protocol.record_batch import Record, encode_batch

_COMMIT_VERSIONS: Final = (7, 9, 10)
_FIRST_COMMIT_BY_ID: Final = 10
_INIT_VERSION: Final = 4
_HEARTBEAT_VERSION: Final = 1
_MOST_AT_A_TIME: Final = 6
_LONGEST_REST_MS: Final = 250
_RARE_PROBABILITY: Final = 0.35
_LAST_LISTED: Final = 9
"""The last version of OffsetFetch with topic names."""
_OWN_PROBABILITY: Final = 0.8
_OTHER_TRANSACTIONAL_ID: Final = "crew-tx"
_MISSING_TOPIC: Final = "missing"
_TOPICS: Final = (FIRST_TOPIC, LATER_TOPIC, SECRET_TOPIC, GUEST_TOPIC, _MISSING_TOPIC)

Asked: TypeAlias = "tuple[ApiKey, int, Message]"


class Guest(SimulatedClient):
    """Sends bursts of requests of all kinds on one connection, mostly those that fast paths answer."""

    def __init__(self, number: int, scene: Scene, promises: Promises) -> None:
        super().__init__(f"{GUESTS[number]}/caller", scene)
        # Two guests that send equal bytes may still get different responses.
        self.client_id = "guests"
        self.bursts = 0
        self._number = number
        self._group = GUEST_GROUPS[number]
        self._promises = promises
        self._version = self.random.choice(_COMMIT_VERSIONS)
        self._shapes = [[FIRST_TOPIC], [FIRST_TOPIC, LATER_TOPIC], [FIRST_TOPIC, SECRET_TOPIC]]
        self._producer = 0, 0
        self._goal = 0
        self._rest_number = 0
        self._usual = (self._commit, self._commit, self._fetch, self._fetch, self._all_topics, self._named_topics)
        self._rare: tuple[Callable[[], Asked], ...] = (
            *(self._describe_topics, self._list_offsets, self._find_coordinator, self._describe_cluster),
            *(self._join, self._sync, self._heartbeat, self._leave, self._delete_offsets, self._delete_groups),
            *(self._describe_groups, self._list_groups, *[self._describe_consumer_groups] * 3),
            *(self._init, self._init, self._add_offsets, self._commit_in_transaction, self._end_transaction),
            *(self._describe_transactions, self._produce, self._read, self._describe_acls, self._create_acls),
            *(self._delete_acls, self._alter_quotas),
        )

    def start(self) -> None:
        self._rest(0)

    def settle(self) -> None:
        self._goal = self.bursts + 2
        self._rest(0)

    def is_settled(self) -> bool:
        return self.bursts >= self._goal

    def on_timeout(self) -> None:
        self._rest(RETRY_MS)

    def _rest(self, delay_ms: int) -> None:
        self._rest_number += 1
        number = self._rest_number
        self.clock.after(delay_ms, lambda: self._send() if number == self._rest_number else None)

    def _send(self) -> None:
        if self.is_waiting:
            return
        for _ in range(self.random.randint(1, _MOST_AT_A_TIME)):
            is_rare = self.random.random() < _RARE_PROBABILITY
            api_key, version, message = self.random.choice(self._rare if is_rare else self._usual)()
            on_answer = self._initialized if api_key is ApiKey.INIT_PRODUCER_ID else self._answered
            self.request(api_key, version, "", message, on_answer)

    def _answered(self, body: bytes) -> None:
        if not self.is_waiting:
            self.bursts += 1
            self._rest(self.random.randint(1, _LONGEST_REST_MS))

    def _initialized(self, body: bytes) -> None:
        response = InitProducerIdResponse.decode(body, _INIT_VERSION)
        if not response.error_code and response.producer_id >= 0:
            self._producer = response.producer_id, response.producer_epoch
        self._answered(body)

    # Requests that fast paths answer.

    def _commit(self) -> Asked:
        offset, version = self._promises.commits.next_offset(), self._version
        partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=offset)
        topics = [
            OffsetCommitRequest.OffsetCommitRequestTopic(
                name=name, topic_id=self._promises.topic_id(name) or bytes(15) + b"\7", partitions=[partition]
            )
            for name in self.random.choice(self._shapes)
        ]
        request = OffsetCommitRequest(group_id=self._group, generation_id_or_member_epoch=-1, topics=topics)
        return ApiKey.OFFSET_COMMIT, version, request

    def _fetch(self) -> Asked:
        by_id = self._version == _FIRST_COMMIT_BY_ID
        topics = [
            OffsetFetchRequest.OffsetFetchRequestTopics(
                name=name, topic_id=self._promises.topic_id(name) or bytes(15) + b"\7", partition_indexes=[0]
            )
            for name in self.random.choice(self._shapes)
        ]
        group_id = self.random.choice((self._group, self._group, self._group, COMMITTER_GROUP))
        group = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group_id, topics=self.random.choice((topics, None)))
        return ApiKey.OFFSET_FETCH, _LAST_LISTED + by_id, OffsetFetchRequest(groups=[group])

    def _all_topics(self) -> Asked:
        asks = self.random.random() < 0.5
        return ApiKey.METADATA, 12, MetadataRequest(topics=None, include_topic_authorized_operations=asks)

    def _named_topics(self) -> Asked:
        """Names existing and missing topics, by name or (v12 only) by id."""
        by_id = self.random.random() < 0.3
        topics = [
            MetadataRequest.MetadataRequestTopic(
                name=None if by_id else name,
                topic_id=(self._promises.topic_id(name) or bytes(16)) if by_id else bytes(16),
            )
            for name in (FIRST_TOPIC, SECRET_TOPIC)
        ]
        request = MetadataRequest(topics=topics, allow_auto_topic_creation=False)
        if by_id:
            return ApiKey.METADATA, 12, request
        request.include_cluster_authorized_operations = request.include_topic_authorized_operations = True
        return ApiKey.METADATA, 9, request

    # Requests of handlers.

    def _describe_topics(self) -> Asked:
        names = self.random.choice(((), _TOPICS))
        topics = [DescribeTopicPartitionsRequest.TopicRequest(name=name) for name in names]
        return (
            ApiKey.DESCRIBE_TOPIC_PARTITIONS,
            0,
            DescribeTopicPartitionsRequest(topics=topics, response_partition_limit=100),
        )

    def _list_offsets(self) -> Asked:
        partition = ListOffsetsRequest.ListOffsetsPartition(partition_index=0, timestamp=-1)
        topics = [ListOffsetsRequest.ListOffsetsTopic(name=name, partitions=[partition]) for name in _TOPICS]
        return ApiKey.LIST_OFFSETS, 7, ListOffsetsRequest(replica_id=-1, topics=topics)

    def _find_coordinator(self) -> Asked:
        key_type = self.random.randrange(2)
        keys = [self._transactional_id] if key_type else [self._group, COMMITTER_GROUP]
        return ApiKey.FIND_COORDINATOR, 4, FindCoordinatorRequest(key_type=key_type, coordinator_keys=keys)

    def _describe_cluster(self) -> Asked:
        return ApiKey.DESCRIBE_CLUSTER, 1, DescribeClusterRequest(include_cluster_authorized_operations=True)

    def _join(self) -> Asked:
        protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"")
        request = JoinGroupRequest(
            group_id=self._group,
            session_timeout_ms=10_000,
            rebalance_timeout_ms=10_000,
            member_id="nobody",
            protocol_type="consumer",
            protocols=[protocol],
        )
        return ApiKey.JOIN_GROUP, 3, request

    def _sync(self) -> Asked:
        return ApiKey.SYNC_GROUP, 2, SyncGroupRequest(group_id=self._group, generation_id=1, member_id="nobody")

    def _heartbeat(self) -> Asked:
        return ApiKey.HEARTBEAT, 3, HeartbeatRequest(group_id=self._group, generation_id=1, member_id="nobody")

    def _leave(self) -> Asked:
        return ApiKey.LEAVE_GROUP, 2, LeaveGroupRequest(group_id=self._group, member_id="nobody")

    def _delete_offsets(self) -> Asked:
        partition = OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=0)
        topics = [
            OffsetDeleteRequest.OffsetDeleteRequestTopic(name=name, partitions=[partition])
            for name in (FIRST_TOPIC, SECRET_TOPIC)
        ]
        return ApiKey.OFFSET_DELETE, 0, OffsetDeleteRequest(group_id=self._group, topics=topics)

    def _delete_groups(self) -> Asked:
        return ApiKey.DELETE_GROUPS, 2, DeleteGroupsRequest(groups_names=[self._group])

    def _describe_groups(self) -> Asked:
        groups = [self._group, COMMITTER_GROUP]
        return ApiKey.DESCRIBE_GROUPS, 5, DescribeGroupsRequest(groups=groups, include_authorized_operations=True)

    def _describe_consumer_groups(self) -> Asked:
        groups = [*GUEST_MEMBER_GROUPS, "group-0"]
        request = ConsumerGroupDescribeRequest(group_ids=groups, include_authorized_operations=True)
        return ApiKey.CONSUMER_GROUP_DESCRIBE, 1, request

    def _list_groups(self) -> Asked:
        return ApiKey.LIST_GROUPS, 5, ListGroupsRequest(states_filter=[], types_filter=[])

    # Transactions and records.

    @property
    def _transactional_id(self) -> str:
        """The id of this guest, or sometimes one that it may hardly ever use."""
        is_own = self.random.random() < _OWN_PROBABILITY
        return f"guest-tx-{self._number}" if is_own else _OTHER_TRANSACTIONAL_ID

    def _init(self) -> Asked:
        transactional_id = self.random.choice((None, self._transactional_id))
        request = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=5_000)
        return ApiKey.INIT_PRODUCER_ID, _INIT_VERSION, request

    def _add_offsets(self) -> Asked:
        request = AddOffsetsToTxnRequest(
            transactional_id=self._transactional_id,
            producer_id=self._producer[0],
            producer_epoch=self._producer[1],
            group_id=self._group,
        )
        return ApiKey.ADD_OFFSETS_TO_TXN, 3, request

    def _commit_in_transaction(self) -> Asked:
        partition = TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(
            partition_index=0, committed_offset=self._promises.commits.next_offset()
        )
        topics = [
            TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(name=name, partitions=[partition])
            for name in (FIRST_TOPIC, SECRET_TOPIC)
        ]
        request = TxnOffsetCommitRequest(
            transactional_id=self._transactional_id,
            group_id=self._group,
            producer_id=self._producer[0],
            producer_epoch=self._producer[1],
            topics=topics,
        )
        return ApiKey.TXN_OFFSET_COMMIT, self.random.choice((3, 5)), request

    def _end_transaction(self) -> Asked:
        request = EndTxnRequest(
            transactional_id=self._transactional_id,
            producer_id=self._producer[0],
            producer_epoch=self._producer[1],
            committed=self.random.random() < 0.5,
        )
        return ApiKey.END_TXN, 3, request

    def _describe_transactions(self) -> Asked:
        request = DescribeTransactionsRequest(transactional_ids=[self._transactional_id])
        return ApiKey.DESCRIBE_TRANSACTIONS, 0, request

    def _produce(self) -> Asked:
        batch = encode_batch([Record(None, b"a guest's record", timestamp_ms=self.clock.now_ms)])
        name = self.random.choice((GUEST_TOPIC, SECRET_TOPIC))
        return ApiKey.PRODUCE, 11, produce_request(Place(name, 0), bytes(16), batch)

    def _read(self) -> Asked:
        topics = [
            FetchRequest.FetchTopic(
                topic=name,
                partitions=[FetchRequest.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1_000)],
            )
            for name in (GUEST_TOPIC, SECRET_TOPIC)
        ]
        request = FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=1_000,
            session_id=0,
            session_epoch=-1,
            topics=topics,
            forgotten_topics_data=[],
            rack_id="",
        )
        return ApiKey.FETCH, 12, request

    # Requests that only operators may send.

    def _describe_acls(self) -> Asked:
        request = DescribeAclsRequest(
            resource_type_filter=ResourceType.ANY,
            resource_name_filter=None,
            pattern_type_filter=PatternType.ANY,
            principal_filter=None,
            host_filter=None,
            operation=AclOperation.ANY,
            permission_type=PermissionType.ANY,
        )
        return ApiKey.DESCRIBE_ACLS, 3, request

    def _create_acls(self) -> Asked:
        own = CreateAclsRequest.AclCreation(
            resource_type=ResourceType.TOPIC,
            resource_name=SECRET_TOPIC,
            resource_pattern_type=PatternType.LITERAL,
            principal=f"User:{GUESTS[self._number]}",
            host="*",
            operation=AclOperation.ALL,
            permission_type=PermissionType.ALLOW,
        )
        return ApiKey.CREATE_ACLS, 3, CreateAclsRequest(creations=[own])

    def _delete_acls(self) -> Asked:
        everything = DeleteAclsRequest.DeleteAclsFilter(
            resource_type_filter=ResourceType.ANY,
            resource_name_filter=None,
            pattern_type_filter=PatternType.ANY,
            principal_filter=None,
            host_filter=None,
            operation=AclOperation.ANY,
            permission_type=PermissionType.ANY,
        )
        return ApiKey.DELETE_ACLS, 3, DeleteAclsRequest(filters=[everything])

    def _alter_quotas(self) -> Asked:
        """Asks for a quota without changing it."""
        entity = AlterClientQuotasRequest.EntityData(entity_type="user", entity_name=GUESTS[self._number])
        operation = AlterClientQuotasRequest.OpData(key="producer_byte_rate", value=1e9, remove=False)
        entry = AlterClientQuotasRequest.EntryData(entity=[entity], ops=[operation])
        return ApiKey.ALTER_CLIENT_QUOTAS, 1, AlterClientQuotasRequest(entries=[entry], validate_only=True)


class GuestMember(SimulatedClient):
    """The only member of a consumer group. It subscribes by name or by regular expression, and accepts every error."""

    def __init__(self, number: int, scene: Scene) -> None:
        super().__init__(f"{GUESTS[number]}/member", scene)
        self.answers = 0
        self._group = GUEST_MEMBER_GROUPS[number]
        self._lives = 0
        self._epoch = 0
        self._owned: list[ConsumerGroupHeartbeatRequest.TopicPartitions] = []
        self._goal = 0

    def start(self) -> None:
        self._beat()

    def settle(self) -> None:
        self._goal = self.answers + 2

    def is_settled(self) -> bool:
        return self.answers >= self._goal

    def on_timeout(self) -> None:
        self._epoch = 0
        self.clock.after(RETRY_MS, self._beat)

    def _beat(self) -> None:
        if self._epoch > 0 and self.random.random() < 0.08:
            self._leave()
            return
        request = ConsumerGroupHeartbeatRequest(
            group_id=self._group,
            member_id=f"{self.name}-{self._lives}",
            member_epoch=self._epoch,
            topic_partitions=self._owned if self._epoch else [],
            rebalance_timeout_ms=5_000,
        )
        if not self._epoch or self.random.random() < 0.1:
            names, regex = self.random.choice(
                (
                    ([FIRST_TOPIC], ""),
                    ([FIRST_TOPIC, LATER_TOPIC], ""),
                    ([], "topic-.*"),
                    ([], ".*"),
                    ([], "s.*|topic-0"),
                )
            )
            request.subscribed_topic_names, request.subscribed_topic_regex = names, regex
        elif self.random.random() < 0.5:
            request.topic_partitions, request.rebalance_timeout_ms = None, -1
        self._ask(request)

    def _leave(self) -> None:
        request = ConsumerGroupHeartbeatRequest(
            group_id=self._group, member_id=f"{self.name}-{self._lives}", member_epoch=-1
        )
        self._lives += 1
        self._ask(request)

    def _ask(self, request: ConsumerGroupHeartbeatRequest) -> None:
        self.request(ApiKey.CONSUMER_GROUP_HEARTBEAT, _HEARTBEAT_VERSION, self._group, request, self._answered)

    def _answered(self, body: bytes) -> None:
        response = ConsumerGroupHeartbeatResponse.decode(body, _HEARTBEAT_VERSION)
        self.answers += 1
        if response.error_code or response.member_epoch < 0:
            self._epoch = 0
        else:
            self._epoch = response.member_epoch
        if response.assignment is not None:
            self._owned = [
                ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id=topic.topic_id, partitions=topic.partitions)
                for topic in response.assignment.topic_partitions
            ]
        self.clock.after(self.random.randint(1, self.options.heartbeat_interval_ms), self._beat)


def guests_of(scene: Scene, promises: Promises) -> list[Guest | GuestMember]:
    numbers = range(len(GUESTS))
    return [
        *(Guest(number, scene, promises) for number in numbers),
        *(GuestMember(number, scene) for number in numbers),
    ]
