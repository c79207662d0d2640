# SPDX-License-Identifier: Apache-2.0
"""The table of the checks of each API: which operation on which resource, and what happens without the right to it.

The handlers make the checks (`RequestContext.rights`). A test compares them with this table, and `docs/make_acls.py`
makes a page of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from kcoord.server.api.authorization import ERRORS
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors


class Check(NamedTuple):
    """One check. `error` is the error of a client without the right; None if something is left out of the response."""

    operation: AclOperation
    resource_type: ResourceType
    error: Errors | None
    note: str = ""


def _needs(operation: AclOperation, resource_type: ResourceType, note: str = "") -> Check:
    return Check(operation, resource_type, ERRORS[resource_type][0], note)


def _filters(operation: AclOperation, resource_type: ResourceType, note: str) -> Check:
    return Check(operation, resource_type, None, note)


_TOPIC, _GROUP, _CLUSTER = ResourceType.TOPIC, ResourceType.GROUP, ResourceType.CLUSTER
_TRANSACTION = ResourceType.TRANSACTIONAL_ID

_READ_GROUP: Final = _needs(AclOperation.READ, _GROUP)
_READ_TOPIC: Final = _needs(AclOperation.READ, _TOPIC, "each topic")
_DESCRIBE_GROUP: Final = _needs(AclOperation.DESCRIBE, _GROUP, "each group")
_DESCRIBE_TOPIC: Final = _needs(AclOperation.DESCRIBE, _TOPIC, "each topic")
_WRITE_TOPIC: Final = _needs(AclOperation.WRITE, _TOPIC, "each topic")
_WRITE_TRANSACTION: Final = _needs(AclOperation.WRITE, _TRANSACTION)
_ALTER_CLUSTER: Final = _needs(AclOperation.ALTER, _CLUSTER)
_CLUSTER_ACTION: Final = _needs(AclOperation.CLUSTER_ACTION, _CLUSTER)
_DESCRIBE_CLUSTER: Final = _needs(AclOperation.DESCRIBE, _CLUSTER)
_CLUSTER_OPERATIONS: Final = _filters(
    AclOperation.DESCRIBE, _CLUSTER, "for the authorized operations on the cluster; otherwise the response has none"
)

CHECKS: Final[Mapping[ApiKey, tuple[Check, ...]]] = {
    ApiKey.PRODUCE: (
        _WRITE_TOPIC,
        _WRITE_TRANSACTION._replace(note="if a batch is transactional; fails all topics"),
    ),
    ApiKey.FETCH: (
        _READ_TOPIC,
        Check(
            AclOperation.CLUSTER_ACTION,
            _CLUSTER,
            Errors.TOPIC_AUTHORIZATION_FAILED,
            "instead, if the request has the id of a replica",
        ),
    ),
    ApiKey.LIST_OFFSETS: (_DESCRIBE_TOPIC,),
    ApiKey.METADATA: (
        _DESCRIBE_TOPIC._replace(note="each topic; a request for all topics gets those with the right"),
        _needs(AclOperation.CREATE, _TOPIC, "each topic that the request creates"),
        _filters(AclOperation.CREATE, _CLUSTER, "suffices to create any topic"),
        _CLUSTER_OPERATIONS,
    ),
    ApiKey.OFFSET_COMMIT: (_READ_GROUP, _READ_TOPIC),
    ApiKey.OFFSET_FETCH: (
        _DESCRIBE_GROUP,
        _DESCRIBE_TOPIC._replace(note="each topic; a request for all topics gets those with the right"),
    ),
    ApiKey.FIND_COORDINATOR: (
        _DESCRIBE_GROUP._replace(note="each group"),
        _needs(AclOperation.DESCRIBE, _TRANSACTION, "each transactional id"),
    ),
    ApiKey.JOIN_GROUP: (_READ_GROUP,),
    ApiKey.HEARTBEAT: (_READ_GROUP,),
    ApiKey.LEAVE_GROUP: (_READ_GROUP,),
    ApiKey.SYNC_GROUP: (_READ_GROUP,),
    ApiKey.DESCRIBE_GROUPS: (_DESCRIBE_GROUP,),
    ApiKey.LIST_GROUPS: (
        _filters(AclOperation.DESCRIBE, _GROUP, "each group; groups without the right are left out"),
        _filters(AclOperation.DESCRIBE, _CLUSTER, "suffices to list all groups"),
    ),
    ApiKey.SASL_HANDSHAKE: (),
    ApiKey.API_VERSIONS: (),
    ApiKey.CREATE_TOPICS: (
        _needs(AclOperation.CREATE, _TOPIC, "each topic"),
        _filters(AclOperation.CREATE, _CLUSTER, "suffices to create any topic"),
        _filters(AclOperation.DESCRIBE_CONFIGS, _TOPIC, "for the configs of each new topic in the response"),
    ),
    ApiKey.DELETE_TOPICS: (
        _needs(AclOperation.DELETE, _TOPIC, "each topic"),
        _needs(AclOperation.DESCRIBE, _TOPIC, "each topic, to learn whether it exists"),
        _filters(AclOperation.DELETE, _CLUSTER, "suffices to delete any topic"),
    ),
    ApiKey.DELETE_RECORDS: (_needs(AclOperation.DELETE, _TOPIC, "each topic"),),
    ApiKey.INIT_PRODUCER_ID: (
        _WRITE_TRANSACTION._replace(note="if the request has a transactional id"),
        _needs(AclOperation.IDEMPOTENT_WRITE, _CLUSTER, "otherwise; WRITE on any topic suffices, too"),
    ),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: (
        _DESCRIBE_TOPIC,
        _filters(AclOperation.CLUSTER_ACTION, _CLUSTER, "suffices for all topics"),
    ),
    ApiKey.ADD_PARTITIONS_TO_TXN: (
        _WRITE_TRANSACTION._replace(note="up to v3"),
        _WRITE_TOPIC._replace(note="each topic, up to v3; internal topics always fail"),
        _CLUSTER_ACTION._replace(note="from v4 on, which brokers send"),
    ),
    ApiKey.ADD_OFFSETS_TO_TXN: (_WRITE_TRANSACTION, _READ_GROUP),
    ApiKey.END_TXN: (_WRITE_TRANSACTION,),
    ApiKey.WRITE_TXN_MARKERS: (
        _CLUSTER_ACTION,
        _filters(AclOperation.ALTER, _CLUSTER, "suffices, too"),
    ),
    ApiKey.TXN_OFFSET_COMMIT: (_WRITE_TRANSACTION, _READ_GROUP, _READ_TOPIC),
    ApiKey.DESCRIBE_ACLS: (_DESCRIBE_CLUSTER,),
    ApiKey.CREATE_ACLS: (_ALTER_CLUSTER,),
    ApiKey.DELETE_ACLS: (_ALTER_CLUSTER,),
    ApiKey.DESCRIBE_CONFIGS: (
        _needs(AclOperation.DESCRIBE_CONFIGS, _TOPIC, "each topic"),
        _needs(AclOperation.DESCRIBE_CONFIGS, _GROUP, "each group"),
        _needs(AclOperation.DESCRIBE_CONFIGS, _CLUSTER, "brokers, loggers and client metrics"),
    ),
    ApiKey.ALTER_CONFIGS: (
        _needs(AclOperation.ALTER_CONFIGS, _TOPIC, "each topic"),
        _needs(AclOperation.ALTER_CONFIGS, _GROUP, "each group"),
        _needs(AclOperation.ALTER_CONFIGS, _CLUSTER, "brokers and client metrics"),
    ),
    ApiKey.ALTER_REPLICA_LOG_DIRS: (_ALTER_CLUSTER,),
    ApiKey.DESCRIBE_LOG_DIRS: (_DESCRIBE_CLUSTER,),
    ApiKey.SASL_AUTHENTICATE: (),
    ApiKey.CREATE_PARTITIONS: (_needs(AclOperation.ALTER, _TOPIC, "each topic"),),
    ApiKey.CREATE_DELEGATION_TOKEN: (
        Check(
            AclOperation.CREATE_TOKENS,
            ResourceType.USER,
            Errors.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
            "the owner, if it is not the client itself",
        ),
    ),
    ApiKey.RENEW_DELEGATION_TOKEN: (),
    ApiKey.EXPIRE_DELEGATION_TOKEN: (),
    ApiKey.DESCRIBE_DELEGATION_TOKEN: (
        _filters(
            AclOperation.DESCRIBE,
            ResourceType.DELEGATION_TOKEN,
            "each token of other owners; tokens without the right are left out",
        ),
        _filters(AclOperation.DESCRIBE_TOKENS, ResourceType.USER, "the owner of the token; suffices, too"),
    ),
    ApiKey.DELETE_GROUPS: (_needs(AclOperation.DELETE, _GROUP, "each group"),),
    ApiKey.ELECT_LEADERS: (_ALTER_CLUSTER,),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: (
        _needs(AclOperation.ALTER_CONFIGS, _TOPIC, "each topic"),
        _needs(AclOperation.ALTER_CONFIGS, _GROUP, "each group"),
        _needs(AclOperation.ALTER_CONFIGS, _CLUSTER, "brokers, loggers and client metrics"),
    ),
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: (_ALTER_CLUSTER,),
    ApiKey.LIST_PARTITION_REASSIGNMENTS: (_DESCRIBE_CLUSTER,),
    ApiKey.OFFSET_DELETE: (_needs(AclOperation.DELETE, _GROUP), _READ_TOPIC),
    ApiKey.DESCRIBE_CLIENT_QUOTAS: (_needs(AclOperation.DESCRIBE_CONFIGS, _CLUSTER),),
    ApiKey.ALTER_CLIENT_QUOTAS: (_needs(AclOperation.ALTER_CONFIGS, _CLUSTER),),
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: (_DESCRIBE_CLUSTER,),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: (_ALTER_CLUSTER,),
    ApiKey.DESCRIBE_QUORUM: (_DESCRIBE_CLUSTER,),
    ApiKey.UPDATE_FEATURES: (_ALTER_CLUSTER,),
    ApiKey.DESCRIBE_CLUSTER: (_CLUSTER_OPERATIONS,),
    ApiKey.DESCRIBE_PRODUCERS: (_READ_TOPIC,),
    ApiKey.UNREGISTER_BROKER: (_ALTER_CLUSTER,),
    ApiKey.DESCRIBE_TRANSACTIONS: (
        _needs(AclOperation.DESCRIBE, _TRANSACTION, "each transactional id"),
        _filters(AclOperation.DESCRIBE, _TOPIC, "each topic; topics without the right are left out"),
    ),
    ApiKey.LIST_TRANSACTIONS: (
        _filters(AclOperation.DESCRIBE, _TRANSACTION, "each transactional id; those without the right are left out"),
    ),
    ApiKey.CONSUMER_GROUP_HEARTBEAT: (
        _READ_GROUP,
        _needs(AclOperation.DESCRIBE, _TOPIC, "each topic of the subscription that is named"),
        _filters(AclOperation.DESCRIBE, _TOPIC, "topics that a regular expression matches; the others do not match"),
    ),
    ApiKey.CONSUMER_GROUP_DESCRIBE: (
        _DESCRIBE_GROUP,
        _needs(AclOperation.DESCRIBE, _TOPIC, "all assigned topics of each group"),
    ),
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: (),
    ApiKey.PUSH_TELEMETRY: (),
    ApiKey.LIST_CONFIG_RESOURCES: (_needs(AclOperation.DESCRIBE_CONFIGS, _CLUSTER),),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: (
        _DESCRIBE_TOPIC._replace(note="each topic; a request for all topics gets those with the right"),
    ),
    ApiKey.CONSUMER_GROUP_PREPARE_ASSIGNMENT: (_READ_GROUP,),
    ApiKey.CONSUMER_GROUP_INSTALL_ASSIGNMENT: (_READ_GROUP,),
}
"""The checks of each served API. An API without checks is open to everyone."""
