# SPDX-License-Identifier: Apache-2.0
"""MetadataImage: the state of the metadata log at one epoch. An image never changes after `build` has returned it.

ImageBuilder makes the next image from an image and records. The two images share the topics, brokers and configs that
the records do not change. A builder copies a topic before its first change, so a published image may be read at any
time while the next one is built.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, TypeAlias

from kcoord.metadata.records import FENCE, KEEP_LEADER, UNFENCE, DelegationTokenData
from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.acls import Acl, AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.internal_topics import INTERNAL_TOPICS
from kcoord_protocol.messages import (
    AccessControlEntryRecord,
    BrokerRegistrationChangeRecord,
    ClientQuotaRecord,
    ConfigRecord,
    DelegationTokenRecord,
    FeatureLevelRecord,
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

TOPIC_RESOURCE: Final = 2
BROKER_RESOURCE: Final = 4
BROKER_LOGGER_RESOURCE: Final = 8
CLIENT_METRICS_RESOURCE: Final = 16
GROUP_RESOURCE: Final = 32

_NO_CONFIGS: Final[Mapping[str, str]] = {}

QuotaEntity: TypeAlias = tuple[tuple[str, str | None], ...]
"""The entity of a quota: pairs of entity type and name, by type. The name None is the default of the type."""


def quota_entity(parts: Iterable[tuple[str, str | None]]) -> QuotaEntity:
    """Returns the entity of these parts. If a type occurs twice, the last name counts, as in Kafka."""
    names = dict(parts)
    return tuple((entity_type, names[entity_type]) for entity_type in sorted(names))


@dataclass(slots=True)
class PartitionImage:
    """A partition with its leader, replicas and epochs."""

    partition_id: int
    leader: int
    leader_epoch: int
    partition_epoch: int
    replicas: list[int]
    isr: list[int]
    directories: list[bytes] = field(default_factory=list)
    creation_time_ms: int = -1


@dataclass(slots=True)
class TopicImage:
    """A topic and its partitions."""

    name: str
    id: bytes
    partitions: list[PartitionImage]
    """`partitions[i]` is partition i."""
    hashed: tuple[Mapping[int, str], int] | None = field(default=None, compare=False, repr=False)
    """The racks and the digest that the group coordinator computed last (`topic_hash`).

    A copy keeps them as long as its digest is the same.
    """

    @property
    def internal(self) -> bool:
        return self.name in INTERNAL_TOPICS


@dataclass(slots=True)
class BrokerImage:
    """A registered broker; `endpoints` are (listener name, host, port, security protocol)."""

    broker_id: int
    broker_epoch: int
    incarnation_id: bytes
    endpoints: list[tuple[str, str, int, int]]
    rack: str | None
    fenced: bool
    log_dirs: list[bytes]


@dataclass(slots=True, frozen=True)
class ScramCredential:
    """What a broker keeps of a user's password (RFC 5802). The secrets are not in its `repr`."""

    salt: bytes = field(repr=False)
    stored_key: bytes = field(repr=False)
    server_key: bytes = field(repr=False)
    iterations: int


@dataclass(slots=True)
class MetadataImage:
    """The cluster's state, as the metadata log has it. The text of the module says how images change."""

    epoch: int
    """The number of records that made the image. All brokers, and the next start, therefore count the same.

    Clients use the features with the greatest epoch that they have seen (KIP-584).
    """
    topics: Mapping[str, TopicImage]
    topics_by_id: Mapping[bytes, TopicImage]
    brokers: Mapping[int, BrokerImage]
    features: Mapping[str, int]
    configs: Mapping[tuple[int, str], Mapping[str, str]]
    """The configs by (resource type, resource name)."""
    next_producer_id: int
    last_creation_time_ms: int
    """The greatest creation time of any partition so far, also of deleted ones."""
    latest_producer_ids: tuple[int, int] = (-1, -1)
    """The id and epoch of the broker that got the newest block of producer ids."""
    scram_credentials: Mapping[tuple[str, str], ScramCredential] = field(default_factory=dict)
    """The credentials by (name of the mechanism, user)."""
    acls: Mapping[bytes, Acl] = field(default_factory=dict)
    """The ACLs by their id. An image shares this mapping with the image before it if no ACL has changed."""
    client_quotas: Mapping[QuotaEntity, Mapping[str, float]] = field(default_factory=dict)
    """The client quotas by entity and key. Shared with the image before it if no quota has changed."""
    delegation_tokens: Mapping[str, DelegationTokenData] = field(default_factory=dict)
    """The delegation tokens by id. Shared with the image before it if no token has changed."""
    racks: Mapping[int, str] = field(init=False, compare=False, repr=False)
    """The racks of the brokers that have one, by broker id."""
    _partition_count: int = field(init=False, default=-1, compare=False, repr=False)
    """Counted when it is first asked for."""
    touched: Sequence[str] = field(init=False, default=(), compare=False, repr=False)
    """The topics that this image may have changed, deleted or configured, if it was built from another image."""
    _token: object = field(init=False, default_factory=object, compare=False, repr=False)
    _origin: object = field(init=False, default=None, compare=False, repr=False)
    """The token of the image that this image was built from. An image would keep all images before it alive."""

    def __post_init__(self) -> None:
        self.racks = {broker_id: broker.rack for broker_id, broker in self.brokers.items() if broker.rack is not None}

    @classmethod
    def empty(cls) -> MetadataImage:
        return cls(0, {}, {}, {}, {}, {}, 0, -1)

    def note_origin(self, origin: MetadataImage, touched: Sequence[str]) -> None:
        """Notes that the image was built from `origin`, by records about the topics `touched`."""
        self._origin, self.touched = origin._token, touched

    def topics_to_compare(self, old: MetadataImage) -> Iterable[str]:
        """Returns the names of the topics in which this image and `old` may differ, also in their configs.

        These are the topics of the records in between, or all topics if there is another image in between.
        """
        if self._origin is old._token:
            return self.touched
        return self.topics if self.topics.keys() == old.topics.keys() else {**old.topics, **self.topics}

    @property
    def partition_count(self) -> int:
        """The number of partitions of all topics."""
        if self._partition_count < 0:
            self._partition_count = sum([len(topic.partitions) for topic in self.topics.values()])
        return self._partition_count

    def topic_configs(self, name: str) -> Mapping[str, str]:
        return self.configs.get((TOPIC_RESOURCE, name), _NO_CONFIGS)

    def group_configs(self, group_id: str) -> Mapping[str, str]:
        return self.configs.get((GROUP_RESOURCE, group_id), _NO_CONFIGS)

    def client_metrics_configs(self, name: str) -> Mapping[str, str]:
        return self.configs.get((CLIENT_METRICS_RESOURCE, name), _NO_CONFIGS)

    def broker_configs(self, node_id: int | str = "") -> Mapping[str, str]:
        """Returns the dynamic configs of one broker, or of all brokers if `node_id` is ""."""
        return self.configs.get((BROKER_RESOURCE, str(node_id)), _NO_CONFIGS)

    def effective_broker_configs(self, node_id: int) -> Mapping[str, str]:
        """Returns the dynamic configs that apply to a broker: those of all brokers, overridden by its own."""
        return {**self.broker_configs(), **self.broker_configs(node_id)}

    def alive_brokers(self) -> frozenset[int]:
        """Returns the brokers that are in service."""
        return frozenset(broker_id for broker_id, broker in self.brokers.items() if not broker.fenced)

    def fenced_brokers(self) -> frozenset[int]:
        """Returns the brokers that are out of service."""
        return frozenset(broker_id for broker_id, broker in self.brokers.items() if broker.fenced)

    def resource_names(self, resource_type: int) -> list[str]:
        """Returns the names of the resources of a type that have configs, sorted."""
        return sorted(name for type_, name in self.configs if type_ == resource_type)

    def partition(self, topic_name: str, partition_id: int) -> PartitionImage | None:
        topic = self.topics.get(topic_name)
        if topic is None or not 0 <= partition_id < len(topic.partitions):
            return None
        return topic.partitions[partition_id]


class ImageBuilder:
    """Applies records to a copy of an image. Skips records of unknown topics, since replay makes no decisions."""

    __slots__ = (
        "_acls",
        "_brokers",
        "_client_quotas",
        "_configs",
        "_creation_time_ms",
        "_delegation_tokens",
        "_features",
        "_image",
        "_next_producer_id",
        "_own_acls",
        "_own_configs",
        "_own_quotas",
        "_own_tokens",
        "_own_topics",
        "_producer_ids",
        "_replayed",
        "_scram_credentials",
        "_topics",
        "_topics_by_id",
        "_touched",
    )

    def __init__(self, image: MetadataImage) -> None:
        self._image = image
        self._topics = dict(image.topics)
        self._topics_by_id = dict(image.topics_by_id)
        self._brokers = dict(image.brokers)
        self._features = dict(image.features)
        self._configs = dict(image.configs)
        self._next_producer_id = image.next_producer_id
        self._producer_ids = image.latest_producer_ids
        self._creation_time_ms = image.last_creation_time_ms
        self._scram_credentials = dict(image.scram_credentials)
        self._acls = image.acls
        self._own_acls: dict[bytes, Acl] | None = None
        self._client_quotas = image.client_quotas
        self._own_quotas: dict[QuotaEntity, Mapping[str, float]] | None = None
        self._delegation_tokens = image.delegation_tokens
        self._own_tokens: dict[str, DelegationTokenData] | None = None
        self._own_topics: set[bytes] = set()
        self._touched: dict[str, None] = {}
        """The names of the topics that records were about, in their order."""
        self._own_configs: dict[tuple[int, str], dict[str, str]] = {}
        self._replayed = 0

    @classmethod
    def of(cls, records: Iterable[CoordinatorRecord]) -> MetadataImage:
        """Returns the image of the records, beginning with an empty image."""
        builder = cls(MetadataImage.empty())
        for record in records:
            builder.replay(record)
        return builder.build()

    def replay(self, record: CoordinatorRecord) -> None:
        """Applies a record. Each record counts for the epoch, also one that changes nothing."""
        self._replayed += 1
        match record.value:
            case TopicRecord() as topic:
                self._add_topic(topic)
            case PartitionRecord() as partition:
                self._put_partition(partition)
            case PartitionChangeRecord() as change:
                self._change_partition(change)
            case RemoveTopicRecord() as removal:
                self._remove_topic(removal)
            case ConfigRecord() as config:
                self._set_config(config)
            case ProducerIdsRecord() as ids:
                self._next_producer_id = max(self._next_producer_id, ids.next_producer_id)
                self._producer_ids = (ids.broker_id, ids.broker_epoch)
            case FeatureLevelRecord() as feature:
                self._set_feature(feature)
            case RegisterBrokerRecord() as broker:
                self._brokers[broker.broker_id] = _broker_image(broker)
            case BrokerRegistrationChangeRecord() as change:
                self._change_broker(change)
            case UnregisterBrokerRecord() as gone:
                self._brokers.pop(gone.broker_id, None)
            case UserScramCredentialRecord() | RemoveUserScramCredentialRecord():
                self._set_scram_credential(record.value)
            case AccessControlEntryRecord() | RemoveAccessControlEntryRecord():
                self._set_acl(record.value)
            case ClientQuotaRecord() as quota:
                self._set_client_quota(quota)
            case DelegationTokenRecord() | RemoveDelegationTokenRecord():
                self._set_delegation_token(record.value)
            case _:
                return

    def build(self) -> MetadataImage:
        """Returns the next image, or the same image if no record was replayed."""
        if not self._replayed:
            return self._image
        image = MetadataImage(
            self._image.epoch + self._replayed,
            self._topics,
            self._topics_by_id,
            self._brokers,
            self._features,
            self._configs,
            self._next_producer_id,
            self._creation_time_ms,
            self._producer_ids,
            self._scram_credentials,
            self._acls,
            self._client_quotas,
            self._delegation_tokens,
        )
        image.note_origin(self._image, tuple(self._touched))
        return image

    def _add_topic(self, record: TopicRecord) -> None:
        topic = TopicImage(record.name, record.topic_id, [])
        self._own_topics.add(record.topic_id)
        self._touched[record.name] = None
        self._topics[record.name] = topic
        self._topics_by_id[record.topic_id] = topic

    def _own_topic(self, topic_id: bytes) -> TopicImage | None:
        """Returns the topic for a change. It is copied before its first change, so published images stay the same."""
        topic = self._topics_by_id.get(topic_id)
        if topic is None or topic_id in self._own_topics:
            return topic
        self._own_topics.add(topic_id)
        self._touched[topic.name] = None
        copy = TopicImage(topic.name, topic.id, list(topic.partitions), topic.hashed)
        self._topics[topic.name] = copy
        self._topics_by_id[topic_id] = copy
        return copy

    def _put_partition(self, record: PartitionRecord) -> None:
        topic = self._own_topic(record.topic_id)
        if topic is None or record.partition_id > len(topic.partitions):
            return
        # Nothing changes the lists of a record or of an image.
        partition = PartitionImage(
            record.partition_id,
            record.leader,
            record.leader_epoch,
            record.partition_epoch,
            record.replicas,
            record.isr,
            record.directories,
            record.creation_time_ms,
        )
        self._creation_time_ms = max(self._creation_time_ms, record.creation_time_ms)
        topic.partitions[record.partition_id : record.partition_id + 1] = [partition]
        topic.hashed = None

    def _change_partition(self, record: PartitionChangeRecord) -> None:
        topic = self._own_topic(record.topic_id)
        if topic is None or not 0 <= record.partition_id < len(topic.partitions):
            return
        partition = replace(topic.partitions[record.partition_id])
        partition.partition_epoch += 1
        if record.isr is not None:
            partition.isr = list(record.isr)
        if record.replicas is not None:
            partition.replicas = list(record.replicas)
            topic.hashed = None
        if record.directories is not None:
            partition.directories = list(record.directories)
        if record.leader != KEEP_LEADER:
            partition.leader = record.leader
            partition.leader_epoch += 1
        topic.partitions[record.partition_id] = partition

    def _remove_topic(self, record: RemoveTopicRecord) -> None:
        topic = self._topics_by_id.pop(record.topic_id, None)
        if topic is None:
            return
        del self._topics[topic.name]
        self._touched[topic.name] = None
        self._configs.pop((TOPIC_RESOURCE, topic.name), None)
        self._own_configs.pop((TOPIC_RESOURCE, topic.name), None)

    def _change_broker(self, record: BrokerRegistrationChangeRecord) -> None:
        broker = self._brokers.get(record.broker_id)
        if broker is not None and record.fenced in (FENCE, UNFENCE):
            self._brokers[record.broker_id] = replace(broker, fenced=record.fenced == FENCE)

    def _set_config(self, record: ConfigRecord) -> None:
        resource = (record.resource_type, record.resource_name)
        if record.resource_type == TOPIC_RESOURCE:
            self._touched[record.resource_name] = None
        own = self._own_configs.get(resource)
        if own is None:
            own = self._own_configs[resource] = dict(self._configs.get(resource, _NO_CONFIGS))
        if record.value is None:
            own.pop(record.name, None)
        else:
            own[record.name] = record.value
        if own:
            self._configs[resource] = own
        else:
            self._configs.pop(resource, None)
            self._own_configs.pop(resource, None)

    def _set_feature(self, record: FeatureLevelRecord) -> None:
        if record.feature_level == 0:
            self._features.pop(record.name, None)
        else:
            self._features[record.name] = record.feature_level

    def _set_scram_credential(self, record: UserScramCredentialRecord | RemoveUserScramCredentialRecord) -> None:
        mechanism = ScramMechanism.of_number(record.mechanism)
        if mechanism is None:
            return
        key = (mechanism.mechanism_name, record.name)
        if isinstance(record, RemoveUserScramCredentialRecord):
            self._scram_credentials.pop(key, None)
        else:
            self._scram_credentials[key] = ScramCredential(
                record.salt, record.stored_key, record.server_key, record.iterations
            )

    def _set_acl(self, record: AccessControlEntryRecord | RemoveAccessControlEntryRecord) -> None:
        if self._own_acls is None:
            self._acls = self._own_acls = dict(self._acls)
        if isinstance(record, RemoveAccessControlEntryRecord):
            self._own_acls.pop(record.id, None)
            return
        self._own_acls[record.id] = Acl(
            ResourceType(record.resource_type),
            record.resource_name,
            PatternType(record.pattern_type),
            record.principal,
            record.host,
            AclOperation(record.operation),
            PermissionType(record.permission_type),
        )

    def _set_client_quota(self, record: ClientQuotaRecord) -> None:
        entity = quota_entity((part.entity_type, part.entity_name) for part in record.entity)
        quotas = dict(self._client_quotas.get(entity, {}))
        if record.remove:
            quotas.pop(record.key, None)
        else:
            quotas[record.key] = record.value
        if self._own_quotas is None:
            self._client_quotas = self._own_quotas = dict(self._client_quotas)
        if quotas:
            self._own_quotas[entity] = quotas
        else:
            self._own_quotas.pop(entity, None)

    def _set_delegation_token(self, record: DelegationTokenRecord | RemoveDelegationTokenRecord) -> None:
        if self._own_tokens is None:
            self._delegation_tokens = self._own_tokens = dict(self._delegation_tokens)
        if isinstance(record, RemoveDelegationTokenRecord):
            self._own_tokens.pop(record.token_id, None)
            return
        self._own_tokens[record.token_id] = DelegationTokenData(
            record.owner,
            record.requester,
            tuple(record.renewers),
            record.issue_timestamp,
            record.max_timestamp,
            record.expiration_timestamp,
        )


def _broker_image(record: RegisterBrokerRecord) -> BrokerImage:
    endpoints = [
        (endpoint.name, endpoint.host, endpoint.port, endpoint.security_protocol) for endpoint in record.end_points
    ]
    return BrokerImage(
        record.broker_id,
        record.broker_epoch,
        record.incarnation_id,
        endpoints,
        record.rack,
        record.fenced,
        list(record.log_dirs),
    )
