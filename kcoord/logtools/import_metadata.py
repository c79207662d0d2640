# SPDX-License-Identifier: Apache-2.0
"""The first metadata log of an imported data folder. Its one broker leads every partition.

Topic ids, partition counts, configs, levels of features, SCRAM credentials, delegation tokens, ACLs and the next
producer id are kept. Leader epochs increase by 1. Creation times are -1 if the source did not record them (KIP-1327).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from kcoord.config import BROKER_KEYS, BrokerConfig, ConfigError, check_group_configs, check_topic_configs
from kcoord.logtools.decode import shown_config
from kcoord.logtools.topic_clues import GuessedTopic
from kcoord.metadata import records
from kcoord.metadata.client_quotas import records_of_quotas
from kcoord.metadata.delegation_tokens import records_of_tokens
from kcoord.metadata.features import METADATA_VERSION, SERVED
from kcoord.metadata.image import (
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
    MetadataImage,
    PartitionImage,
)
from kcoord.metadata.scram import records_of_credentials
from kcoord.metadata.topics import internal_topic_configs
from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC
from kcoord_protocol.messages import PartitionRecord
from kcoord_protocol.uuid import ZERO_UUID


@dataclass(slots=True)
class MetadataImport:
    """Creates the records. `new_uuid` returns a new random id."""

    config: BrokerConfig
    directory_id: bytes
    new_uuid: Callable[[], bytes]
    skipped: Counter[str] = field(default_factory=Counter)
    """Counts of entries that kcoord does not support."""

    def from_image(self, image: MetadataImage) -> list[CoordinatorRecord]:
        """Returns the records for the content of a source's metadata log."""
        made = list(self._features(image.features))
        made += self._offsets_topic(image)
        for name, topic in sorted(image.topics.items()):
            if topic.internal:
                if name != GROUP_METADATA_TOPIC:
                    self.skipped[f"internal topic {name}"] += 1
                continue
            made.append(records.new_topic_record(name, topic.id))
            made += self._configs(TOPIC_RESOURCE, name, image.topic_configs(name))
            made += (self._partition(topic.id, partition) for partition in topic.partitions)
        made += self._other_configs(image)
        made += records_of_credentials(image)
        made += records_of_tokens(image)
        made += (records.new_acl_record(acl_id, acl) for acl_id, acl in image.acls.items())
        made += records_of_quotas(image)
        if image.next_producer_id:
            made.append(records.new_producer_ids_record(self.config.node_id, -1, image.next_producer_id))
        return made

    def from_clues(self, topics: Iterable[GuessedTopic], next_producer_id: int) -> list[CoordinatorRecord]:
        """Returns the records for topics that were guessed from the group records."""
        made = list(self._offsets_topic(MetadataImage.empty()))
        for topic in topics:
            topic_id = self.new_uuid() if topic.id == ZERO_UUID else topic.id
            made.append(records.new_topic_record(topic.name, topic_id))
            made += (self._new_partition(topic_id, number, -1) for number in range(topic.partitions))
        if next_producer_id:
            made.append(records.new_producer_ids_record(self.config.node_id, -1, next_producer_id))
        return made

    def _features(self, levels: Mapping[str, int]) -> Iterator[CoordinatorRecord]:
        """Yields the levels of the features that kcoord implements. Without any, a folder counts as new at its start.

        `metadata.version` is at least that of the records that are written here. A source without levels was never
        served.
        """
        supported = records.supported_features(self.config.kcoord_release)
        for name, lowest in {**dict.fromkeys(SERVED, 0), METADATA_VERSION: records.METADATA_VERSION}.items():
            level = min(max(levels.get(name, 0), lowest), supported[name][1])
            if levels and level:
                yield records.new_feature_level_record(name, level)

    def _offsets_topic(self, image: MetadataImage) -> Iterator[CoordinatorRecord]:
        """Yields the offsets topic with the partition count of this broker's configuration.

        The import routes the groups to their new partitions.
        """
        source = image.topics.get(GROUP_METADATA_TOPIC)
        topic_id = source.id if source is not None else self.new_uuid()
        yield records.new_topic_record(GROUP_METADATA_TOPIC, topic_id)
        configs = image.topic_configs(GROUP_METADATA_TOPIC)
        if source is None:
            configs = internal_topic_configs(self.config, GROUP_METADATA_TOPIC)
        yield from self._configs(TOPIC_RESOURCE, GROUP_METADATA_TOPIC, configs)
        creation_time_ms = source.partitions[0].creation_time_ms if source is not None and source.partitions else -1
        for number in range(self.config.offsets_topic_num_partitions):
            yield self._new_partition(topic_id, number, creation_time_ms)

    def _new_partition(self, topic_id: bytes, number: int, creation_time_ms: int) -> CoordinatorRecord:
        return records.new_partition_record(
            topic_id, number, [self.config.node_id], [self.directory_id], creation_time_ms
        )

    def _partition(self, topic_id: bytes, partition: PartitionImage) -> CoordinatorRecord:
        """Increments the epochs. They must not decrease, since the stored batches carry the leader epoch."""
        record = self._new_partition(topic_id, partition.partition_id, partition.creation_time_ms)
        assert isinstance(record.value, PartitionRecord)
        record.value.leader_epoch = partition.leader_epoch + 1
        record.value.partition_epoch = partition.partition_epoch + 1
        return record

    def _other_configs(self, image: MetadataImage) -> Iterator[CoordinatorRecord]:
        for resource_type, name in sorted(image.configs):
            configs = image.configs[resource_type, name]
            if resource_type == BROKER_RESOURCE and name not in ("", str(self.config.node_id)):
                self.skipped[f"configs of broker {name}"] += len(configs)
            elif resource_type in (BROKER_RESOURCE, CLIENT_METRICS_RESOURCE, GROUP_RESOURCE):
                yield from self._configs(resource_type, name, configs)

    def _configs(self, resource_type: int, name: str, configs: Mapping[str, str]) -> list[CoordinatorRecord]:
        """Returns the configs that this broker would accept from a client, and counts the others.

        A config may be valid only together with others. So those that are left are checked again after each addition.
        """
        kept: dict[str, str] = {}
        errors: dict[str, ConfigError] = {}
        while True:
            before = len(kept)
            for key in sorted(configs.keys() - kept.keys()):
                try:
                    self._check(resource_type, {**kept, key: configs[key]})
                except ConfigError as error:
                    errors[key] = error
                else:
                    kept[key] = configs[key]
            if len(kept) == before:
                break
        for key in sorted(configs.keys() - kept.keys()):
            self.skipped[f"config {key}={shown_config(resource_type, key, configs[key])}: {errors[key]}"] += 1
        return records.new_config_records(resource_type, name, {}, kept)

    def _check(self, resource_type: int, configs: Mapping[str, str]) -> None:
        if resource_type == TOPIC_RESOURCE:
            check_topic_configs(self.config, configs)
        elif resource_type == GROUP_RESOURCE:
            check_group_configs(self.config, configs)
        elif resource_type == BROKER_RESOURCE:
            for key, value in configs.items():
                if key not in BROKER_KEYS:
                    raise ConfigError(f"Unknown broker config name: {key}")
                BROKER_KEYS[key].parse(value)
