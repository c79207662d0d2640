# SPDX-License-Identifier: Apache-2.0
"""The only constructors of metadata records, in the versions that Kafka 4.3.1 writes at metadata.version 30."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.acls import Acl
from kcoord_protocol.messages import (
    AccessControlEntryRecord,
    BrokerRegistrationChangeRecord,
    ClientQuotaRecord,
    ConfigRecord,
    DelegationTokenRecord,
    FeatureLevelRecord,
    Message,
    PartitionChangeRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RegisterBrokerRecord,
    RemoveAccessControlEntryRecord,
    RemoveDelegationTokenRecord,
    RemoveTopicRecord,
    RemoveUserScramCredentialRecord,
    TopicRecord,
    UnregisterBrokerRecord,
    UserScramCredentialRecord,
)
from kcoord_protocol.scram_mechanisms import ScramMechanism

PARTITION_RECORD_VERSION: Final = 2
PARTITION_CHANGE_RECORD_VERSION: Final = 2
KEEP_LEADER: Final = -2
"""PartitionChangeRecord's default leader: the leader does not change."""
NO_LEADER: Final = -1
FENCE: Final = 1
UNFENCE: Final = -1
BROKER_REGISTRATION_CHANGE_RECORD_VERSION: Final = 3
REGISTER_BROKER_RECORD_VERSION: Final = 4

METADATA_VERSION: Final = 30
BOOTSTRAP_FEATURES: Final[Mapping[str, int]] = {
    "metadata.version": METADATA_VERSION,
    "group.version": 1,
    "transaction.version": 2,
}
"""The feature levels of a new cluster. Java clients enable the consumer protocol and KIP-890 by them."""

SUPPORTED_FEATURES: Final[Mapping[str, tuple[int, int]]] = {
    "eligible.leader.replicas.version": (0, 1),
    "group.version": (0, 1),
    "kraft.version": (0, 1),
    "metadata.version": (7, METADATA_VERSION),
    "transaction.version": (0, 2),
}
LATEST_METADATA_VERSIONS: Final[Mapping[str, int]] = {"4.3": METADATA_VERSION, "4.4": 33}
"""The latest metadata.version by release of Kafka.

A new cluster finalizes METADATA_VERSION under both releases, because kcoord writes the same records. A data folder can
therefore be opened under either release.
"""


def supported_features(release: str) -> dict[str, tuple[int, int]]:
    """Returns the lowest and highest levels of the features under a release of Kafka."""
    lowest, _ = SUPPORTED_FEATURES["metadata.version"]
    return {**SUPPORTED_FEATURES, "metadata.version": (lowest, LATEST_METADATA_VERSIONS[release])}


@dataclass(slots=True)
class BrokerRegistration:
    """The registration of a broker at its start; `endpoints` are (listener name, host, port, security protocol)."""

    broker_id: int
    incarnation_id: bytes
    endpoints: list[tuple[str, str, int, int]]
    rack: str | None
    log_dirs: list[bytes]


@dataclass(slots=True, frozen=True)
class DelegationTokenData:
    """A delegation token (KIP-48). Principals are `Type:name`; times are in milliseconds since 1970."""

    owner: str
    """The principal as which the holder of the token logs in."""
    requester: str
    renewers: tuple[str, ...]
    """Principals that may renew and expire the token, besides its owner."""
    issue_ms: int
    max_ms: int
    """The latest possible expiry time."""
    expiry_ms: int

    def is_of(self, principal: str) -> bool:
        """Returns whether the principal is the owner or a renewer."""
        return principal == self.owner or principal in self.renewers

    def is_expired(self, now_ms: int) -> bool:
        """Returns whether the token has expired. In the millisecond of its expiry time it is still valid."""
        return min(self.max_ms, self.expiry_ms) < now_ms

    def expiring(self, expiry_ms: int) -> DelegationTokenData:
        """Returns the token with another expiry time, its maximum time at most."""
        return replace(self, expiry_ms=min(self.max_ms, expiry_ms))


def _record(value: Message, version: int = 0) -> CoordinatorRecord:
    return CoordinatorRecord(None, value, version)


def new_topic_record(name: str, topic_id: bytes) -> CoordinatorRecord:
    return _record(TopicRecord(name=name, topic_id=topic_id))


def new_remove_topic_record(topic_id: bytes) -> CoordinatorRecord:
    return _record(RemoveTopicRecord(topic_id=topic_id))


def new_partition_record(
    topic_id: bytes,
    partition_id: int,
    replicas: list[int],
    directories: list[bytes],
    creation_time_ms: int,
    isr: list[int] | None = None,
) -> CoordinatorRecord:
    """Creates a partition. The first in-sync replica leads it.

    All replicas are in sync, unless `isr` names fewer. The creation time is that of KIP-1327. The record keeps
    the lists.
    """
    in_sync = replicas if isr is None else isr
    value = PartitionRecord(
        partition_id=partition_id,
        topic_id=topic_id,
        replicas=replicas,
        isr=in_sync or replicas,
        leader=in_sync[0] if in_sync else NO_LEADER,
        leader_epoch=0,
        partition_epoch=0,
        directories=directories,
        creation_time_ms=creation_time_ms,
    )
    return _record(value, PARTITION_RECORD_VERSION)


def new_partition_change_record(
    topic_id: bytes, partition_id: int, replicas: list[int], directories: list[bytes], leader: int
) -> CoordinatorRecord:
    """Moves a partition to other brokers. The first broker leads it.

    A new leader epoch begins unless that broker is `leader`, the current leader.
    """
    new_leader = replicas[0] if replicas[0] != leader else None
    return new_reassignment_record(topic_id, partition_id, replicas, directories, new_leader)


def new_reassignment_record(
    topic_id: bytes,
    partition_id: int,
    replicas: list[int],
    directories: list[bytes],
    leader: int | None,
    isr: list[int] | None = None,
) -> CoordinatorRecord:
    """Gives a partition these replicas. All are in sync, unless `isr` names fewer.

    If `leader` is given, a new leader epoch begins, even if `leader` is the current leader.
    """
    value = PartitionChangeRecord(
        partition_id=partition_id,
        topic_id=topic_id,
        isr=list(replicas if isr is None else isr),
        leader=leader if leader is not None else KEEP_LEADER,
        replicas=list(replicas),
        directories=directories,
    )
    return _record(value, PARTITION_CHANGE_RECORD_VERSION)


def new_leader_record(topic_id: bytes, partition_id: int, isr: list[int], leader: int | None) -> CoordinatorRecord:
    """Changes the in-sync replicas of a partition and, if `leader` is given, its leader."""
    value = PartitionChangeRecord(
        partition_id=partition_id, topic_id=topic_id, isr=list(isr), leader=KEEP_LEADER if leader is None else leader
    )
    return _record(value, PARTITION_CHANGE_RECORD_VERSION)


def new_fence_record(broker_id: int, broker_epoch: int, *, fenced: bool) -> CoordinatorRecord:
    """Fences a broker (takes it out of service), or unfences it."""
    value = BrokerRegistrationChangeRecord(
        broker_id=broker_id, broker_epoch=broker_epoch, fenced=FENCE if fenced else UNFENCE
    )
    return _record(value, BROKER_REGISTRATION_CHANGE_RECORD_VERSION)


def new_unregister_broker_record(broker_id: int, broker_epoch: int) -> CoordinatorRecord:
    return _record(UnregisterBrokerRecord(broker_id=broker_id, broker_epoch=broker_epoch))


def new_config_record(resource_type: int, resource_name: str, name: str, value: str | None) -> CoordinatorRecord:
    """Sets a config; None removes it."""
    return _record(ConfigRecord(resource_type=resource_type, resource_name=resource_name, name=name, value=value))


def new_config_records(
    resource_type: int, resource_name: str, old: Mapping[str, str], new: Mapping[str, str]
) -> list[CoordinatorRecord]:
    """Returns the records that turn the configs `old` of a resource into `new`."""
    changed: Iterable[str] = sorted(name for name in {**old, **new} if old.get(name) != new.get(name))
    return [new_config_record(resource_type, resource_name, name, new.get(name)) for name in changed]


def new_producer_ids_record(broker_id: int, broker_epoch: int, next_producer_id: int) -> CoordinatorRecord:
    """Marks all producer ids below `next_producer_id` as allocated."""
    value = ProducerIdsRecord(broker_id=broker_id, broker_epoch=broker_epoch, next_producer_id=next_producer_id)
    return _record(value)


def new_feature_level_record(name: str, level: int) -> CoordinatorRecord:
    return _record(FeatureLevelRecord(name=name, feature_level=level))


def new_scram_credential_record(
    mechanism: ScramMechanism, user: str, salt: bytes, stored_key: bytes, server_key: bytes, iterations: int
) -> CoordinatorRecord:
    """Returns the record of a credential; raises ValueError if nobody could log in with these keys."""
    if not len(stored_key) == len(server_key) == mechanism.key_bytes:
        raise ValueError(
            f"the {mechanism.mechanism_name} credential of user {user!r} has keys of {len(stored_key)} and "
            f"{len(server_key)} bytes, not {mechanism.key_bytes}; delete it"
        )
    value = UserScramCredentialRecord(
        name=user, mechanism=mechanism, salt=salt, stored_key=stored_key, server_key=server_key, iterations=iterations
    )
    return _record(value)


def new_remove_scram_credential_record(mechanism: ScramMechanism, user: str) -> CoordinatorRecord:
    return _record(RemoveUserScramCredentialRecord(name=user, mechanism=mechanism))


def new_delegation_token_record(token_id: str, token: DelegationTokenData) -> CoordinatorRecord:
    """Creates a token, or replaces the token with this id."""
    value = DelegationTokenRecord(
        owner=token.owner,
        requester=token.requester,
        renewers=list(token.renewers),
        issue_timestamp=token.issue_ms,
        max_timestamp=token.max_ms,
        expiration_timestamp=token.expiry_ms,
        token_id=token_id,
    )
    return _record(value)


def new_remove_delegation_token_record(token_id: str) -> CoordinatorRecord:
    return _record(RemoveDelegationTokenRecord(token_id=token_id))


def new_acl_record(acl_id: bytes, acl: Acl) -> CoordinatorRecord:
    value = AccessControlEntryRecord(
        id=acl_id,
        resource_type=acl.resource_type,
        resource_name=acl.resource_name,
        pattern_type=acl.pattern_type,
        principal=acl.principal,
        host=acl.host,
        operation=acl.operation,
        permission_type=acl.permission_type,
    )
    return _record(value)


def new_remove_acl_record(acl_id: bytes) -> CoordinatorRecord:
    return _record(RemoveAccessControlEntryRecord(id=acl_id))


def new_client_quota_record(entity: Iterable[tuple[str, str | None]], key: str, value: float) -> CoordinatorRecord:
    return _record(ClientQuotaRecord(entity=_quota_entity(entity), key=key, value=value))


def new_remove_client_quota_record(entity: Iterable[tuple[str, str | None]], key: str) -> CoordinatorRecord:
    return _record(ClientQuotaRecord(entity=_quota_entity(entity), key=key, remove=True))


def _quota_entity(entity: Iterable[tuple[str, str | None]]) -> list[ClientQuotaRecord.EntityData]:
    return [ClientQuotaRecord.EntityData(entity_type=entity_type, entity_name=name) for entity_type, name in entity]


def new_register_broker_record(registration: BrokerRegistration, broker_epoch: int) -> CoordinatorRecord:
    """Registers a broker. It is in service at once, since there is no separate controller that would unfence it."""
    value = RegisterBrokerRecord(
        broker_id=registration.broker_id,
        incarnation_id=registration.incarnation_id,
        broker_epoch=broker_epoch,
        end_points=[
            RegisterBrokerRecord.BrokerEndpoint(name=name, host=host, port=port, security_protocol=protocol)
            for name, host, port, protocol in registration.endpoints
        ],
        features=[
            RegisterBrokerRecord.BrokerFeature(name=name, min_supported_version=low, max_supported_version=high)
            for name, (low, high) in SUPPORTED_FEATURES.items()
        ],
        rack=registration.rack,
        fenced=False,
        log_dirs=list(registration.log_dirs),
    )
    return _record(value, REGISTER_BROKER_RECORD_VERSION)
