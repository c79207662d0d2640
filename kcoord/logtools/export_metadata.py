# SPDX-License-Identifier: Apache-2.0
"""The metadata log with which Apache Kafka 4.3.1 starts on an exported folder.

It is the log of a single controller after a clean shutdown: no broker is registered, and every partition has one
in-sync replica and no leader. The broker registers when it starts, and the controller then elects it.
Creation times stay in the records (KIP-1327). Kafka ignores them, and its own snapshots do not have them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Final

from kcoord.metadata import records
from kcoord.metadata.client_quotas import records_of_quotas
from kcoord.metadata.delegation_tokens import records_of_tokens
from kcoord.metadata.image import BROKER_RESOURCE, MetadataImage, PartitionImage
from kcoord.metadata.scram import records_of_credentials
from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.messages import PartitionRecord

KAFKA_FEATURES: Final[Mapping[str, int]] = {"metadata.version": 30, "group.version": 1, "transaction.version": 2}
"""The feature levels of a new cluster of Kafka 4.3.1, which are also its highest ones. `kraft.version` is 0 and has no
record: the voters come from `controller.quorum.voters`.
"""
CONFIG_PREFIX: Final = "kcoord."


class MetadataExport:
    """Creates the records for one broker, `node_id`, whose only log directory has the id `directory_id`."""

    def __init__(self, node_id: int, source_node_id: int, directory_id: bytes) -> None:
        self._node_id = node_id
        self._source_node_id = source_node_id
        self._directory_id = directory_id
        self.skipped: Counter[str] = Counter()
        """Counts of entries that Kafka does not support."""
        self.notes: list[str] = []

    def from_image(self, image: MetadataImage) -> list[CoordinatorRecord]:
        """Returns the records. Features come first, as Kafka writes them."""
        made = list(self._features(image.features))
        for name, topic in sorted(image.topics.items()):
            made.append(records.new_topic_record(name, topic.id))
            made += (self._partition(topic.id, partition) for partition in topic.partitions)
            self._note_min_insync_replicas(name, image.topic_configs(name))
        for (resource_type, name), configs in sorted(image.configs.items()):
            made += self._configs(resource_type, name, configs)
        made += records_of_credentials(image)
        made += records_of_tokens(image)
        for acl_id, acl in image.acls.items():
            made.append(records.new_acl_record(acl_id, acl))
            if "/" in acl.host:
                self.notes.append(f"Kafka 4.3.1 does not treat the host as a range, so it matches no client: {acl}")
        made += records_of_quotas(image)
        if image.next_producer_id:
            made.append(records.new_producer_ids_record(self._node_id, -1, image.next_producer_id))
        return made

    def _features(self, levels: Mapping[str, int]) -> Iterator[CoordinatorRecord]:
        """Yields the feature levels.

        `metadata.version` matches the records that are written here. Other levels are those of the source, at most
        Kafka's highest. A source that was never served has no levels and gets those of a new cluster.
        """
        for name, highest in KAFKA_FEATURES.items():
            level = min(levels.get(name, 0), highest) if levels and name != "metadata.version" else highest
            if level:
                yield records.new_feature_level_record(name, level)

    def _partition(self, topic_id: bytes, partition: PartitionImage) -> CoordinatorRecord:
        """Keeps both epochs. They must not decrease, since stored batches carry the leader epoch.

        Kafka's election of the leader increments both.
        """
        record = records.new_partition_record(
            topic_id, partition.partition_id, [self._node_id], [self._directory_id], partition.creation_time_ms, isr=[]
        )
        assert isinstance(record.value, PartitionRecord)
        record.value.leader_epoch = partition.leader_epoch
        record.value.partition_epoch = partition.partition_epoch
        return record

    def _note_min_insync_replicas(self, topic: str, configs: Mapping[str, str]) -> None:
        minimum = configs.get("min.insync.replicas", "1")
        if minimum != "1":
            self.notes.append(
                f"{topic}: min.insync.replicas={minimum}, but its partitions have one replica now: "
                "Kafka rejects producers with acks=all until the config is 1"
            )

    def _configs(self, resource_type: int, name: str, configs: Mapping[str, str]) -> list[CoordinatorRecord]:
        if resource_type == BROKER_RESOURCE and name not in ("", str(self._source_node_id)):
            self.skipped[f"configs of broker {name}"] += len(configs)
            return []
        kept = {key: value for key, value in configs.items() if not key.startswith(CONFIG_PREFIX)}
        for key in sorted(configs.keys() - kept.keys()):
            self.skipped[f"config {key}: Kafka does not have it"] += 1
        target = str(self._node_id) if resource_type == BROKER_RESOURCE and name else name
        return records.new_config_records(resource_type, target, {}, kept)
