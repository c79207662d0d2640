# SPDX-License-Identifier: Apache-2.0
"""Requests of each served API that meet all checks of the API, about things that only an administrator knows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from kcoord.config import SecurityProtocol
from kcoord.metadata.image import (
    BROKER_LOGGER_RESOURCE,
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
)
from kcoord_protocol import messages
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    CreateDelegationTokenRequest,
    CreateDelegationTokenResponse,
    InitProducerIdRequest,
    InitProducerIdResponse,
    Message,
    OffsetCommitRequest,
    OffsetFetchRequest,
)
from kcoord_protocol.record_batch import Record, encode_batch
from tests.unit.server.people import NOW_MS, Cluster

SECRETS = ("secret-topic", "secret-group", "secret-transaction", "secret-member", "secret-text", "secret-owner")
TOPIC, GROUP, TRANSACTION, MEMBER, TEXT, OWNER = SECRETS


CREATE_TOKEN = CreateDelegationTokenRequest(owner_principal_type="User", owner_principal_name=OWNER, max_lifetime_ms=-1)


def batch(**fields: Any) -> bytes:
    return encode_batch([Record(timestamp_ms=NOW_MS, key=b"k", value=TEXT.encode())], **fields)


def request_of(key: ApiKey, /, **fields: Any) -> Message:
    name = "".join(part.capitalize() for part in key.name.split("_"))
    return cast("Message", getattr(messages, f"{name}Request")(**fields))


def part_of(key: ApiKey, struct: str, /, **fields: Any) -> Any:
    return getattr(type(request_of(key)), struct)(**fields)


def produce(transactional_id: str | None) -> Message:
    producer = {"producer_id": 7, "producer_epoch": 0, "base_sequence": 0, "is_transactional": True}
    records = batch(**(producer if transactional_id else {}))
    data = part_of(ApiKey.PRODUCE, "PartitionProduceData", index=0, records=records)
    topic = part_of(ApiKey.PRODUCE, "TopicProduceData", name=TOPIC, partition_data=[data])
    return request_of(ApiKey.PRODUCE, transactional_id=transactional_id, acks=1, timeout_ms=1000, topic_data=[topic])


def fetch(replica_id: int) -> Message:
    partition = part_of(ApiKey.FETCH, "FetchPartition", partition=0, fetch_offset=0, partition_max_bytes=1 << 20)
    topic = part_of(ApiKey.FETCH, "FetchTopic", topic=TOPIC, partitions=[partition])
    return request_of(ApiKey.FETCH, replica_id=replica_id, max_wait_ms=0, session_epoch=-1, topics=[topic])


def topics(key: ApiKey, struct: str, partition: Any, **fields: Any) -> list[Any]:
    return [part_of(key, struct, name=TOPIC, partitions=[partition], **fields)]


def commit(key: ApiKey, topic: str, partition: str) -> list[Any]:
    return topics(key, topic, part_of(key, partition, partition_index=0, committed_offset=5))


def configs(key: ApiKey, kind: int, name: str, **fields: Any) -> Message:
    struct = "DescribeConfigsResource" if key is ApiKey.DESCRIBE_CONFIGS else "AlterConfigsResource"
    resource = part_of(key, struct, resource_type=kind, resource_name=name, **fields)
    return request_of(key, resources=[resource])


def alterations(key: ApiKey) -> list[tuple[Message, int]]:
    kinds = (
        (TOPIC_RESOURCE, TOPIC, "retention.ms", "1"),
        (GROUP_RESOURCE, GROUP, "consumer.session.timeout.ms", "50000"),
        (BROKER_RESOURCE, "", "log.retention.ms", "1"),
        (CLIENT_METRICS_RESOURCE, "metrics", "interval.ms", "1000"),
    )
    return [
        (configs(key, kind, name, configs=[part_of(key, "AlterableConfig", name=config, value=value)]), 0)
        for kind, name, config, value in kinds
    ]


def heartbeat(**fields: Any) -> ConsumerGroupHeartbeatRequest:
    return ConsumerGroupHeartbeatRequest(
        group_id=GROUP, rebalance_timeout_ms=60_000, topic_partitions=[], **{"member_id": MEMBER, **fields}
    )


MEMBERSHIP: dict[str, Any] = {"group_id": GROUP, "member_id": MEMBER, "generation_id": 1}
PRODUCER: dict[str, Any] = {"transactional_id": TRANSACTION, "producer_id": 7, "producer_epoch": 0}
NAMED_PARTITIONS = AddPartitionsToTxnRequest.AddPartitionsToTxnTopic(name=TOPIC, partitions=[0])
FETCHED = OffsetFetchRequest.OffsetFetchRequestTopics(name=TOPIC, partition_indexes=[0])

K = ApiKey
EXAMPLES: dict[ApiKey, list[tuple[Message, int]]] = {
    K.PRODUCE: [(produce(None), 9), (produce(TRANSACTION), 9)],
    K.FETCH: [(fetch(-1), 12), (fetch(1), 12)],
    K.LIST_OFFSETS: [
        (
            request_of(
                K.LIST_OFFSETS,
                topics=topics(
                    K.LIST_OFFSETS,
                    "ListOffsetsTopic",
                    part_of(K.LIST_OFFSETS, "ListOffsetsPartition", partition_index=0, timestamp=-1),
                ),
            ),
            7,
        )
    ],
    K.METADATA: [
        (request_of(K.METADATA, topics=[part_of(K.METADATA, "MetadataRequestTopic", name=TOPIC)]), 12),
        (request_of(K.METADATA, topics=[part_of(K.METADATA, "MetadataRequestTopic", name="new-topic")]), 12),
        (request_of(K.METADATA, topics=None, include_cluster_authorized_operations=True), 10),
    ],
    K.OFFSET_COMMIT: [
        (
            OffsetCommitRequest(
                group_id=GROUP,
                generation_id_or_member_epoch=-1,
                topics=commit(K.OFFSET_COMMIT, "OffsetCommitRequestTopic", "OffsetCommitRequestPartition"),
            ),
            9,
        )
    ],
    K.OFFSET_FETCH: [
        (OffsetFetchRequest(groups=[OffsetFetchRequest.OffsetFetchRequestGroup(group_id=GROUP, topics=[FETCHED])]), 9),
        (OffsetFetchRequest(groups=[OffsetFetchRequest.OffsetFetchRequestGroup(group_id=GROUP, topics=None)]), 9),
    ],
    K.FIND_COORDINATOR: [
        (request_of(K.FIND_COORDINATOR, key_type=0, coordinator_keys=[GROUP]), 6),
        (request_of(K.FIND_COORDINATOR, key_type=1, coordinator_keys=[TRANSACTION]), 6),
        (request_of(K.FIND_COORDINATOR, key_type=0, key=GROUP), 3),
    ],
    K.JOIN_GROUP: [
        (request_of(K.JOIN_GROUP, group_id=GROUP, protocol_type="consumer", session_timeout_ms=30_000), 9),
    ],
    K.HEARTBEAT: [(request_of(K.HEARTBEAT, **MEMBERSHIP), 4)],
    K.LEAVE_GROUP: [(request_of(K.LEAVE_GROUP, group_id=GROUP, members=[]), 5)],
    K.SYNC_GROUP: [(request_of(K.SYNC_GROUP, **MEMBERSHIP, protocol_type="consumer", protocol_name="range"), 5)],
    K.DESCRIBE_GROUPS: [(request_of(K.DESCRIBE_GROUPS, groups=[GROUP], include_authorized_operations=True), 6)],
    K.LIST_GROUPS: [(request_of(K.LIST_GROUPS), 5)],
    K.SASL_HANDSHAKE: [(request_of(K.SASL_HANDSHAKE, mechanism="PLAIN"), 1)],
    K.SASL_AUTHENTICATE: [(request_of(K.SASL_AUTHENTICATE, auth_bytes=b""), 2)],
    K.API_VERSIONS: [(request_of(K.API_VERSIONS, client_software_name="a", client_software_version="1"), 4)],
    K.CREATE_TOPICS: [
        (
            request_of(
                K.CREATE_TOPICS,
                topics=[
                    part_of(K.CREATE_TOPICS, "CreatableTopic", name="other", num_partitions=1, replication_factor=1)
                ],
                timeout_ms=1000,
            ),
            7,
        )
    ],
    K.DELETE_TOPICS: [(request_of(K.DELETE_TOPICS, topic_names=[TOPIC], timeout_ms=1000), 5)],
    K.DELETE_RECORDS: [
        (
            request_of(
                K.DELETE_RECORDS,
                topics=topics(
                    K.DELETE_RECORDS,
                    "DeleteRecordsTopic",
                    part_of(K.DELETE_RECORDS, "DeleteRecordsPartition", partition_index=0, offset=0),
                ),
            ),
            2,
        )
    ],
    K.INIT_PRODUCER_ID: [
        (request_of(K.INIT_PRODUCER_ID, transactional_id=None), 5),
        (request_of(K.INIT_PRODUCER_ID, transactional_id=TRANSACTION, transaction_timeout_ms=1000), 5),
    ],
    K.OFFSET_FOR_LEADER_EPOCH: [
        (
            request_of(
                K.OFFSET_FOR_LEADER_EPOCH,
                topics=[
                    part_of(
                        K.OFFSET_FOR_LEADER_EPOCH,
                        "OffsetForLeaderTopic",
                        topic=TOPIC,
                        partitions=[
                            part_of(K.OFFSET_FOR_LEADER_EPOCH, "OffsetForLeaderPartition", partition=0, leader_epoch=0)
                        ],
                    )
                ],
            ),
            4,
        )
    ],
    K.ADD_PARTITIONS_TO_TXN: [
        (
            AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=TRANSACTION,
                v3_and_below_producer_id=7,
                v3_and_below_topics=[NAMED_PARTITIONS],
            ),
            3,
        ),
        (
            AddPartitionsToTxnRequest(
                transactions=[
                    AddPartitionsToTxnRequest.AddPartitionsToTxnTransaction(**PRODUCER, topics=[NAMED_PARTITIONS])
                ]
            ),
            5,
        ),
    ],
    K.ADD_OFFSETS_TO_TXN: [(request_of(K.ADD_OFFSETS_TO_TXN, **PRODUCER, group_id=GROUP), 4)],
    K.END_TXN: [(request_of(K.END_TXN, **PRODUCER, committed=True), 4)],
    K.WRITE_TXN_MARKERS: [
        (
            request_of(
                K.WRITE_TXN_MARKERS,
                markers=[
                    part_of(
                        K.WRITE_TXN_MARKERS,
                        "WritableTxnMarker",
                        producer_id=7,
                        topics=[
                            part_of(K.WRITE_TXN_MARKERS, "WritableTxnMarkerTopic", name=TOPIC, partition_indexes=[0])
                        ],
                    )
                ],
            ),
            1,
        )
    ],
    K.TXN_OFFSET_COMMIT: [
        (
            request_of(
                K.TXN_OFFSET_COMMIT,
                **PRODUCER,
                group_id=GROUP,
                topics=commit(K.TXN_OFFSET_COMMIT, "TxnOffsetCommitRequestTopic", "TxnOffsetCommitRequestPartition"),
            ),
            4,
        )
    ],
    K.DESCRIBE_ACLS: [
        (
            request_of(K.DESCRIBE_ACLS, resource_type_filter=1, pattern_type_filter=1, operation=1, permission_type=1),
            3,
        )
    ],
    K.CREATE_ACLS: [
        (
            request_of(
                K.CREATE_ACLS,
                creations=[
                    part_of(
                        K.CREATE_ACLS,
                        "AclCreation",
                        resource_type=2,
                        resource_name="x",
                        resource_pattern_type=3,
                        principal="User:x",
                        host="*",
                        operation=3,
                        permission_type=3,
                    )
                ],
            ),
            3,
        )
    ],
    K.DELETE_ACLS: [
        (
            request_of(
                K.DELETE_ACLS,
                filters=[
                    part_of(
                        K.DELETE_ACLS,
                        "DeleteAclsFilter",
                        resource_type_filter=1,
                        pattern_type_filter=1,
                        operation=1,
                        permission_type=1,
                    )
                ],
            ),
            3,
        )
    ],
    K.DESCRIBE_CONFIGS: [
        (configs(K.DESCRIBE_CONFIGS, TOPIC_RESOURCE, TOPIC), 4),
        (configs(K.DESCRIBE_CONFIGS, GROUP_RESOURCE, GROUP), 4),
        (configs(K.DESCRIBE_CONFIGS, BROKER_RESOURCE, "1"), 4),
        (configs(K.DESCRIBE_CONFIGS, BROKER_LOGGER_RESOURCE, "1"), 4),
        (configs(K.DESCRIBE_CONFIGS, CLIENT_METRICS_RESOURCE, "metrics"), 4),
    ],
    K.ALTER_CONFIGS: alterations(K.ALTER_CONFIGS),
    K.ALTER_REPLICA_LOG_DIRS: [
        (
            request_of(
                K.ALTER_REPLICA_LOG_DIRS,
                dirs=[
                    part_of(
                        K.ALTER_REPLICA_LOG_DIRS,
                        "AlterReplicaLogDir",
                        path="data",
                        topics=[
                            part_of(K.ALTER_REPLICA_LOG_DIRS, "AlterReplicaLogDirTopic", name=TOPIC, partitions=[0])
                        ],
                    )
                ],
            ),
            2,
        )
    ],
    K.DESCRIBE_LOG_DIRS: [(request_of(K.DESCRIBE_LOG_DIRS, topics=None), 4)],
    K.CREATE_PARTITIONS: [
        (
            request_of(
                K.CREATE_PARTITIONS,
                topics=[part_of(K.CREATE_PARTITIONS, "CreatePartitionsTopic", name=TOPIC, count=2, assignments=None)],
                timeout_ms=1000,
            ),
            3,
        )
    ],
    K.CREATE_DELEGATION_TOKEN: [(CREATE_TOKEN, 3)],
    K.RENEW_DELEGATION_TOKEN: [(request_of(K.RENEW_DELEGATION_TOKEN, hmac=b"unknown"), 2)],
    K.EXPIRE_DELEGATION_TOKEN: [(request_of(K.EXPIRE_DELEGATION_TOKEN, hmac=b"unknown"), 2)],
    K.DESCRIBE_DELEGATION_TOKEN: [(request_of(K.DESCRIBE_DELEGATION_TOKEN, owners=None), 3)],
    K.DELETE_GROUPS: [(request_of(K.DELETE_GROUPS, groups_names=[GROUP]), 2)],
    K.ELECT_LEADERS: [(request_of(K.ELECT_LEADERS, topic_partitions=None, timeout_ms=1000), 2)],
    K.INCREMENTAL_ALTER_CONFIGS: [
        *alterations(K.INCREMENTAL_ALTER_CONFIGS),
        (configs(K.INCREMENTAL_ALTER_CONFIGS, BROKER_LOGGER_RESOURCE, "1", configs=[]), 1),
    ],
    K.ALTER_PARTITION_REASSIGNMENTS: [(request_of(K.ALTER_PARTITION_REASSIGNMENTS, timeout_ms=1000), 0)],
    K.LIST_PARTITION_REASSIGNMENTS: [(request_of(K.LIST_PARTITION_REASSIGNMENTS, timeout_ms=1000), 0)],
    K.OFFSET_DELETE: [
        (
            request_of(
                K.OFFSET_DELETE,
                group_id=GROUP,
                topics=topics(
                    K.OFFSET_DELETE,
                    "OffsetDeleteRequestTopic",
                    part_of(K.OFFSET_DELETE, "OffsetDeleteRequestPartition", partition_index=0),
                ),
            ),
            0,
        )
    ],
    K.DESCRIBE_CLIENT_QUOTAS: [(request_of(K.DESCRIBE_CLIENT_QUOTAS, components=[]), 1)],
    K.ALTER_CLIENT_QUOTAS: [
        (request_of(K.ALTER_CLIENT_QUOTAS, entries=[part_of(K.ALTER_CLIENT_QUOTAS, "EntryData", entity=[], ops=[])]), 1)
    ],
    K.DESCRIBE_USER_SCRAM_CREDENTIALS: [(request_of(K.DESCRIBE_USER_SCRAM_CREDENTIALS, users=None), 0)],
    K.ALTER_USER_SCRAM_CREDENTIALS: [
        (
            request_of(
                K.ALTER_USER_SCRAM_CREDENTIALS,
                deletions=[
                    part_of(K.ALTER_USER_SCRAM_CREDENTIALS, "ScramCredentialDeletion", name="someone", mechanism=1)
                ],
            ),
            0,
        )
    ],
    K.DESCRIBE_QUORUM: [
        (
            request_of(
                K.DESCRIBE_QUORUM,
                topics=[
                    part_of(
                        K.DESCRIBE_QUORUM,
                        "TopicData",
                        topic_name="__cluster_metadata",
                        partitions=[part_of(K.DESCRIBE_QUORUM, "PartitionData", partition_index=0)],
                    )
                ],
            ),
            2,
        )
    ],
    K.UPDATE_FEATURES: [(request_of(K.UPDATE_FEATURES, timeout_ms=1000), 1)],
    K.DESCRIBE_CLUSTER: [(request_of(K.DESCRIBE_CLUSTER, include_cluster_authorized_operations=True), 1)],
    K.DESCRIBE_PRODUCERS: [
        (
            request_of(
                K.DESCRIBE_PRODUCERS,
                topics=[part_of(K.DESCRIBE_PRODUCERS, "TopicRequest", name=TOPIC, partition_indexes=[0])],
            ),
            0,
        )
    ],
    K.UNREGISTER_BROKER: [(request_of(K.UNREGISTER_BROKER, broker_id=77), 0)],
    K.DESCRIBE_TRANSACTIONS: [(request_of(K.DESCRIBE_TRANSACTIONS, transactional_ids=[TRANSACTION]), 0)],
    K.LIST_TRANSACTIONS: [(request_of(K.LIST_TRANSACTIONS), 1)],
    K.CONSUMER_GROUP_HEARTBEAT: [(heartbeat(subscribed_topic_names=[TOPIC]), 1)],
    K.CONSUMER_GROUP_DESCRIBE: [
        (request_of(K.CONSUMER_GROUP_DESCRIBE, group_ids=[GROUP], include_authorized_operations=True), 1)
    ],
    K.CONSUMER_GROUP_PREPARE_ASSIGNMENT: [
        (request_of(K.CONSUMER_GROUP_PREPARE_ASSIGNMENT, group_id=GROUP, member_id="m"), 0)
    ],
    K.CONSUMER_GROUP_INSTALL_ASSIGNMENT: [
        (request_of(K.CONSUMER_GROUP_INSTALL_ASSIGNMENT, group_id=GROUP, member_id="m"), 0)
    ],
    K.GET_TELEMETRY_SUBSCRIPTIONS: [(request_of(K.GET_TELEMETRY_SUBSCRIPTIONS), 0)],
    K.PUSH_TELEMETRY: [(request_of(K.PUSH_TELEMETRY), 0)],
    K.LIST_CONFIG_RESOURCES: [(request_of(K.LIST_CONFIG_RESOURCES), 1)],
    K.DESCRIBE_TOPIC_PARTITIONS: [
        (
            request_of(
                K.DESCRIBE_TOPIC_PARTITIONS,
                topics=[part_of(K.DESCRIBE_TOPIC_PARTITIONS, "TopicRequest", name=TOPIC)],
            ),
            0,
        ),
        (request_of(K.DESCRIBE_TOPIC_PARTITIONS), 0),
    ],
}


async def fill(cluster: Cluster) -> None:
    """Creates a topic with a record, a group with a member and an offset, an open transaction and a delegation token.

    All are secret. The listener counts as one with SASL, since other ones have no tokens.
    """
    await cluster.create_topics(TOPIC)
    endpoints = cluster.broker.endpoints
    endpoints["PLAINTEXT"] = replace(endpoints["PLAINTEXT"], security_protocol=SecurityProtocol.SASL_PLAINTEXT)
    admin = cluster.admin
    token = await admin.ask(CREATE_TOKEN, 3, CreateDelegationTokenResponse)
    assert token.error_code == 0
    await admin.answer_bytes(produce(None), 9)
    member: dict[str, Any] = {"member_epoch": 0, "subscribed_topic_names": [TOPIC]}
    joined = await admin.ask(heartbeat(**member), 1, ConsumerGroupHeartbeatResponse)
    assert joined.assignment is not None, joined
    owned = [
        ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id=topic.topic_id, partitions=topic.partitions)
        for topic in joined.assignment.topic_partitions
    ]
    assert owned
    commit_request = OffsetCommitRequest(
        group_id=GROUP,
        member_id=MEMBER,
        generation_id_or_member_epoch=joined.member_epoch,
        topics=commit(K.OFFSET_COMMIT, "OffsetCommitRequestTopic", "OffsetCommitRequestPartition"),
    )
    await admin.answer_bytes(commit_request, 9)
    init = InitProducerIdRequest(transactional_id=TRANSACTION, transaction_timeout_ms=60_000)
    producer = await admin.ask(init, 4, InitProducerIdResponse)
    add = AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=TRANSACTION,
        v3_and_below_producer_id=producer.producer_id,
        v3_and_below_producer_epoch=producer.producer_epoch,
        v3_and_below_topics=[NAMED_PARTITIONS],
    )
    added = await admin.ask(add, 3, AddPartitionsToTxnResponse)
    assert added.results_by_topic_v3_and_below[0].results_by_partition[0].partition_error_code == 0
