# SPDX-License-Identifier: Apache-2.0
"""What all instances in front of an upstream have to know alike: creation times of partitions, configs of groups. Pure.

Theory of operation
-------------------
The instances share one compacted log. Each of them reads all of it, and each may append at any time, without a lock. So
the order of the log decides:

* The last record about a config of a group counts. Two changes at the same time are in some order, the same for all.
* The first record about a partition counts. Several instances may see a new partition at the same time, and propose a
  creation time each. An instance uses no proposal before it has read it in the log, so all use the same one, and it
  never changes.

Compaction keeps the last record of a key, which may be a proposal that came too late. Therefore whoever reads such a
record appends the times that count (`corrections`). The log is compacted only long after that.

A record about an instance says that it joins or has left the group of the instances. It has no state. The others take
it as a hint.

The record version is that of the records about groups in the upstream. `kcoord.runtime.shard_map` computes which one
all instances read. If that is higher than the one in this log, an instance appends it here. Owners write records of a
version only after they have read the version here. So a release that cannot read all records learns it at its start,
also if no other instance runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kcoord.metadata.image import GROUP_RESOURCE, MetadataImage
from kcoord.metadata.records import new_config_records
from kcoord.metadata.upstream import UpstreamSnapshot
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult
from kcoord.runtime.shard_map import RECORD_VERSION
from kcoord_protocol.messages import (
    ConfigRecord,
    SharedGroupConfigKey,
    SharedGroupConfigValue,
    SharedInstanceKey,
    SharedInstanceValue,
    SharedRecordVersionKey,
    SharedRecordVersionValue,
    SharedTopicKey,
    SharedTopicValue,
)

SHARED_RECORDS: Final = ("SharedGroupConfig", "SharedTopic", "SharedInstance", "SharedRecordVersion")
FIRST_RECORD_VERSION: Final = 1


class SharedMetadata:
    """The state that follows from the records of the log, in their order."""

    def __init__(self) -> None:
        self.group_configs: dict[str, dict[str, str]] = {}
        self.creation_times: dict[bytes, Sequence[int]] = {}
        """By topic id: the creation time of each partition."""
        self.record_version = FIRST_RECORD_VERSION
        """The highest version of the records about groups. It never falls."""
        self._late: set[bytes] = set()
        """The topics whose last record does not have the times that count."""

    def replay(self, record: CoordinatorRecord) -> int | None:
        """Applies a record. Returns the node id of an instance that joins or has left, if the record says so."""
        match record.key, record.value:
            case SharedGroupConfigKey() as key, None:
                configs = self.group_configs.get(key.group, {})
                configs.pop(key.name, None)
                if not configs:
                    self.group_configs.pop(key.group, None)
            case SharedGroupConfigKey() as key, SharedGroupConfigValue() as value:
                self.group_configs.setdefault(key.group, {})[key.name] = value.value
            case SharedTopicKey() as key, None:
                self.creation_times.pop(key.topic_id, None)
                self._late.discard(key.topic_id)
            case SharedTopicKey() as key, SharedTopicValue() as value:
                self._replay_times(key.topic_id, value.creation_times_ms)
            case SharedRecordVersionKey(), SharedRecordVersionValue() as value:
                self.record_version = max(self.record_version, value.record_version)
            case SharedInstanceKey() as key, _:
                return key.node_id
        return None

    def _replay_times(self, topic_id: bytes, proposed: Sequence[int]) -> None:
        first = self.creation_times.get(topic_id, ())
        times = self.creation_times[topic_id] = [*first, *proposed[len(first) :]]
        if list(proposed) == times:
            self._late.discard(topic_id)
        else:
            self._late.add(topic_id)

    def why_unreadable(self) -> str | None:
        """Returns why this release must not own groups; None if it reads all records about groups."""
        if self.record_version <= RECORD_VERSION:
            return None
        return (
            f"the upstream has records about groups of version {self.record_version}, and this release reads versions "
            f"up to {RECORD_VERSION}"
        )

    def corrections(self) -> list[CoordinatorRecord]:
        """Returns the records that have to be appended, because the last ones of their keys came too late."""
        return [new_topic_times_record(topic_id, self.creation_times[topic_id]) for topic_id in sorted(self._late)]

    def unstamped(self, image: MetadataImage, snapshot: UpstreamSnapshot, now_ms: int) -> list[CoordinatorRecord]:
        """Returns proposals for all partitions of the upstream that have no creation time yet.

        A partition that the image of this instance has already keeps its time, if no other instance was faster.
        """
        records = []
        for topic in snapshot.topics:
            times = list(self.creation_times.get(topic.id, ()))
            if len(times) >= len(topic.partitions):
                continue
            own = image.topics_by_id.get(topic.id)
            stamped = [] if own is None else [partition.creation_time_ms for partition in own.partitions]
            times += stamped[len(times) : len(topic.partitions)]
            times += [now_ms] * (len(topic.partitions) - len(times))
            records.append(new_topic_times_record(topic.id, times))
        return records

    def obsolete(self, topic_ids: Iterable[bytes]) -> list[CoordinatorRecord]:
        """Returns the tombstones of topics that exist no more."""
        return [
            CoordinatorRecord(SharedTopicKey(topic_id=key), None) for key in topic_ids if key in self.creation_times
        ]


def new_topic_times_record(topic_id: bytes, times_ms: Sequence[int]) -> CoordinatorRecord:
    return CoordinatorRecord(SharedTopicKey(topic_id=topic_id), SharedTopicValue(creation_times_ms=list(times_ms)))


def new_instance_record(node_id: int) -> CoordinatorRecord:
    """Returns the record that an instance joins or has left the group of the instances."""
    return CoordinatorRecord(SharedInstanceKey(node_id=node_id), SharedInstanceValue())


def new_record_version_record(record_version: int) -> CoordinatorRecord:
    """Returns the record that owners may write records of a version."""
    return CoordinatorRecord(SharedRecordVersionKey(), SharedRecordVersionValue(record_version=record_version))


def shared_config_records(records: Iterable[CoordinatorRecord]) -> list[CoordinatorRecord]:
    """Returns the shared records of changes of group configs in the metadata log."""
    shared = []
    for record in records:
        change = record.value
        assert isinstance(change, ConfigRecord) and change.resource_type == GROUP_RESOURCE
        value = None if change.value is None else SharedGroupConfigValue(value=change.value)
        shared.append(CoordinatorRecord(SharedGroupConfigKey(group=change.resource_name, name=change.name), value))
    return shared


def follow_group_configs(
    image: MetadataImage, group_configs: Mapping[str, Mapping[str, str]]
) -> CoordinatorResult[None]:
    """Makes the group configs of an image those that all instances share."""
    own = {name: configs for (kind, name), configs in image.configs.items() if kind == GROUP_RESOURCE}
    records: list[CoordinatorRecord] = []
    for group in sorted({*own, *group_configs}):
        records += new_config_records(GROUP_RESOURCE, group, own.get(group, {}), group_configs.get(group, {}))
    return CoordinatorResult(None, records)
