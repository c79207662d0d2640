# SPDX-License-Identifier: Apache-2.0
"""Tables of the versions that a broker serves."""

from __future__ import annotations

from kcoord_protocol.api_keys import ApiKey

KIP_1327_VERSIONS = {
    ApiKey.METADATA: 14,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: 1,
    ApiKey.CONSUMER_GROUP_HEARTBEAT: 2,
    ApiKey.CONSUMER_GROUP_DESCRIBE: 2,
}
"""The first version of each API that KIP-1327 adds. Connections of the form `off` get no such version."""

NEW_PARTITIONS_HANDLER = "consumer_group_heartbeat_new_partitions"
"""The handler of ConsumerGroupHeartbeat for the form `new-partitions`, whose v2 has another layout."""

KAFKA_4_4_VERSIONS = {ApiKey.API_VERSIONS: 5, ApiKey.TXN_OFFSET_COMMIT: 6, ApiKey.DELETE_GROUPS: 3}
"""The first version of each API that Kafka 4.4 adds; `kcoord.release=4.3` hides them."""

UNSTABLE_VERSIONS = {ApiKey.INIT_PRODUCER_ID: 6}
"""The first version of each API that is not final in Kafka 4.4; `unstable.api.versions.enable` shows them."""

SERVED_VERSIONS: dict[ApiKey, range] = {
    ApiKey.PRODUCE: range(0, 14),
    ApiKey.FETCH: range(4, 19),
    ApiKey.LIST_OFFSETS: range(1, 12),
    ApiKey.METADATA: range(0, 15),
    ApiKey.OFFSET_COMMIT: range(1, 11),
    ApiKey.OFFSET_FETCH: range(1, 11),
    ApiKey.FIND_COORDINATOR: range(0, 7),
    ApiKey.JOIN_GROUP: range(0, 10),
    ApiKey.HEARTBEAT: range(0, 5),
    ApiKey.LEAVE_GROUP: range(0, 6),
    ApiKey.SYNC_GROUP: range(0, 6),
    ApiKey.DESCRIBE_GROUPS: range(0, 7),
    ApiKey.LIST_GROUPS: range(0, 6),
    ApiKey.SASL_HANDSHAKE: range(0, 2),
    ApiKey.API_VERSIONS: range(0, 6),
    ApiKey.CREATE_TOPICS: range(2, 8),
    ApiKey.DELETE_TOPICS: range(1, 7),
    ApiKey.DELETE_RECORDS: range(0, 3),
    ApiKey.INIT_PRODUCER_ID: range(0, 7),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: range(2, 5),
    ApiKey.ADD_PARTITIONS_TO_TXN: range(0, 6),
    ApiKey.ADD_OFFSETS_TO_TXN: range(0, 5),
    ApiKey.END_TXN: range(0, 6),
    ApiKey.WRITE_TXN_MARKERS: range(1, 3),
    ApiKey.TXN_OFFSET_COMMIT: range(0, 7),
    ApiKey.DESCRIBE_ACLS: range(1, 4),
    ApiKey.CREATE_ACLS: range(1, 4),
    ApiKey.DELETE_ACLS: range(1, 4),
    ApiKey.DESCRIBE_CONFIGS: range(1, 5),
    ApiKey.ALTER_CONFIGS: range(0, 3),
    ApiKey.ALTER_REPLICA_LOG_DIRS: range(1, 3),
    ApiKey.DESCRIBE_LOG_DIRS: range(1, 6),
    ApiKey.SASL_AUTHENTICATE: range(0, 3),
    ApiKey.CREATE_PARTITIONS: range(0, 4),
    ApiKey.CREATE_DELEGATION_TOKEN: range(1, 4),
    ApiKey.RENEW_DELEGATION_TOKEN: range(1, 3),
    ApiKey.EXPIRE_DELEGATION_TOKEN: range(1, 3),
    ApiKey.DESCRIBE_DELEGATION_TOKEN: range(1, 4),
    ApiKey.DELETE_GROUPS: range(0, 4),
    ApiKey.ELECT_LEADERS: range(0, 3),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: range(0, 2),
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: range(0, 2),
    ApiKey.LIST_PARTITION_REASSIGNMENTS: range(0, 1),
    ApiKey.OFFSET_DELETE: range(0, 1),
    ApiKey.DESCRIBE_CLIENT_QUOTAS: range(0, 2),
    ApiKey.ALTER_CLIENT_QUOTAS: range(0, 2),
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: range(0, 1),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: range(0, 1),
    ApiKey.DESCRIBE_QUORUM: range(0, 3),
    ApiKey.UPDATE_FEATURES: range(0, 3),
    ApiKey.DESCRIBE_CLUSTER: range(0, 3),
    ApiKey.DESCRIBE_PRODUCERS: range(0, 1),
    ApiKey.UNREGISTER_BROKER: range(0, 1),
    ApiKey.DESCRIBE_TRANSACTIONS: range(0, 1),
    ApiKey.LIST_TRANSACTIONS: range(0, 3),
    ApiKey.CONSUMER_GROUP_HEARTBEAT: range(0, 3),
    ApiKey.CONSUMER_GROUP_DESCRIBE: range(0, 3),
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: range(0, 1),
    ApiKey.PUSH_TELEMETRY: range(0, 1),
    ApiKey.LIST_CONFIG_RESOURCES: range(0, 2),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: range(0, 2),
    ApiKey.CONSUMER_GROUP_PREPARE_ASSIGNMENT: range(0, 1),
    ApiKey.CONSUMER_GROUP_INSTALL_ASSIGNMENT: range(0, 1),
}
"""The served versions of each API. Its handler is `kcoord.server.api.handlers.<its name>`.

A handler is imported at the first request, because importing all handlers would take most of the start. A test compares
this table with the VERSIONS of the handlers. As in Kafka, Produce lists versions 0 to 2 for old librdkafka, and rejects
them.
"""

CLIENT_ASSIGNOR_APIS = (ApiKey.CONSUMER_GROUP_PREPARE_ASSIGNMENT, ApiKey.CONSUMER_GROUP_INSTALL_ASSIGNMENT)
"""The APIs of client-side assignors, which are served only if `kcoord.client.assignors.enable` is true."""

TELEMETRY_APIS = (ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY)
"""APIs that are always served, but listed only if the broker takes the metrics of clients."""

FIRST_LISTED_VERSIONS = {ApiKey.OFFSET_COMMIT: 2}
"""The first listed version of each API whose first served version is lower, as in Kafka. Clients that send OffsetCommit
v1 are older than ApiVersions.
"""
