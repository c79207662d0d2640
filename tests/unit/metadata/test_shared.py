# SPDX-License-Identifier: Apache-2.0
"""What instances share: all agree on the first creation time of a partition, whatever compaction removes."""

from __future__ import annotations

from random import Random

import pytest

from kcoord.metadata.image import GROUP_RESOURCE, TOPIC_RESOURCE
from kcoord.metadata.records import new_config_record
from kcoord.metadata.shared import (
    SHARED_RECORDS,
    SharedMetadata,
    follow_group_configs,
    new_instance_record,
    new_record_version_record,
    new_topic_times_record,
    shared_config_records,
)
from kcoord.metadata.upstream import UpstreamPartition, UpstreamSnapshot, UpstreamTopic
from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_map import RECORD_VERSION
from tests.unit.metadata.cluster import Cluster

TOPICS = [bytes(15) + bytes([number]) for number in range(3)]
SERDE = CoordinatorSerde(SHARED_RECORDS)
NO_IMAGE = Cluster().image


def snapshot(counts: dict[bytes, int]) -> UpstreamSnapshot:
    partition = UpstreamPartition(1, 0, (1,), (1,))
    return UpstreamSnapshot([], [UpstreamTopic(key.hex(), key, [partition] * count) for key, count in counts.items()])


class Log:
    """The shared log. `clean` compacts all but the last records."""

    def __init__(self) -> None:
        self.records: list[tuple[bytes, bytes | None] | None] = []

    def append(self, records: list[CoordinatorRecord]) -> None:
        for record in records:
            key, value = SERDE.serialize(record)
            assert key is not None
            self.records.append((key, value))

    def clean(self, end: int) -> None:
        last = {record[0]: place for place, record in enumerate(self.records) if record is not None}
        for place, record in enumerate(self.records[:end]):
            if record is not None and last[record[0]] != place:
                self.records[place] = None


class Instance:
    def __init__(self, log: Log) -> None:
        self.log = log
        self.shared = SharedMetadata()
        self.position = 0
        self.announced: list[int] = []

    def read(self, end: int | None = None) -> None:
        end = len(self.log.records) if end is None else end
        while self.position < end:
            record = self.log.records[self.position]
            self.position += 1
            if record is not None:
                decoded = SERDE.deserialize(*record)
                assert decoded is not None
                node_id = self.shared.replay(decoded)
                if node_id is not None:
                    self.announced.append(node_id)


@pytest.mark.parametrize("seed", range(100))
def test_all_instances_agree_on_the_first_times(seed: int) -> None:
    random = Random(seed)
    log, counts, now_ms = Log(), dict.fromkeys(TOPICS, 1), 0
    instances = [Instance(log) for _ in range(3)]
    used: dict[tuple[bytes, int], int] = {}
    for _ in range(60):
        now_ms += random.randrange(5)
        instance = random.choice(instances)
        match random.randrange(5):
            case 0:
                counts[random.choice(TOPICS)] += 1
            case 1:
                log.append(instance.shared.unstamped(NO_IMAGE, snapshot(counts), now_ms))
            case 2:
                instance.read(random.randint(instance.position, len(log.records)))
            case 3:
                instance.read()
                log.append(instance.shared.corrections())
            case 4:
                # The cleaner stays behind instances by more time than any of them needs for a correction.
                behind = min(instance.position for instance in instances)
                if not any(instance.shared.corrections() for instance in instances):
                    log.clean(behind)
        for reader in instances:
            for topic_id, times in reader.shared.creation_times.items():
                for number, time_ms in enumerate(times):
                    assert used.setdefault((topic_id, number), time_ms) == time_ms
    for instance in instances:
        instance.read()
        log.append(instance.shared.corrections())
    log.clean(len(log.records))
    late = Instance(log)
    late.read()
    assert not late.shared.corrections()
    assert late.shared.creation_times == instances[0].shared.creation_times


def test_a_partition_of_the_image_keeps_its_time() -> None:
    shared = SharedMetadata()
    (record,) = shared.unstamped(NO_IMAGE, snapshot({TOPICS[0]: 2}), 7)
    assert record == new_topic_times_record(TOPICS[0], [7, 7])
    shared.replay(record)
    assert not shared.unstamped(NO_IMAGE, snapshot({TOPICS[0]: 2}), 9)
    (record,) = shared.unstamped(NO_IMAGE, snapshot({TOPICS[0]: 3}), 9)
    assert record == new_topic_times_record(TOPICS[0], [7, 7, 9])


def test_a_time_that_came_too_late_is_corrected_once() -> None:
    shared = SharedMetadata()
    for times in ([7], [9]):
        shared.replay(new_topic_times_record(TOPICS[0], times))
    (correction,) = shared.corrections()
    assert correction == new_topic_times_record(TOPICS[0], [7])
    shared.replay(correction)
    assert shared.corrections() == []
    shared.replay(new_topic_times_record(TOPICS[0], [9]))
    (tombstone,) = shared.obsolete([TOPICS[0]])
    shared.replay(tombstone)
    assert shared.corrections() == []


def test_topics_that_are_gone_are_forgotten() -> None:
    shared = SharedMetadata()
    shared.replay(new_topic_times_record(TOPICS[0], [7]))
    assert shared.obsolete([TOPICS[1]]) == []
    (tombstone,) = shared.obsolete([TOPICS[0]])
    assert SERDE.serialize(tombstone)[1] is None
    shared.replay(tombstone)
    assert shared.creation_times == {}


def test_the_last_value_of_a_config_counts_and_reaches_the_image() -> None:
    shared, cluster = SharedMetadata(), Cluster()
    name = "consumer.session.timeout.ms"
    for group, value in (("g", "50000"), ("h", "51000"), ("g", "52000"), ("h", None)):
        for record in shared_config_records([new_config_record(GROUP_RESOURCE, group, name, value)]):
            shared.replay(record)
    assert shared.group_configs == {"g": {name: "52000"}}
    for expected in (2, 0):
        before = len(cluster.log)
        cluster.result(lambda machine, context: follow_group_configs(machine.image, shared.group_configs))
        assert len(cluster.log) - before == min(expected, 1)
    assert cluster.image.configs[GROUP_RESOURCE, "g"] == {name: "52000"}
    cluster.result(lambda machine, context: follow_group_configs(machine.image, {}))
    assert (GROUP_RESOURCE, "g") not in cluster.image.configs
    with pytest.raises(AssertionError):
        shared_config_records([new_config_record(TOPIC_RESOURCE, "t", "retention.ms", "1")])


def test_an_announcement_is_a_hint_without_state() -> None:
    log = Log()
    log.append([new_instance_record(7)])
    instance = Instance(log)
    instance.read()
    assert instance.announced == [7]
    assert not instance.shared.creation_times and not instance.shared.group_configs


def test_the_record_version_never_falls_and_a_release_says_what_it_cannot_read() -> None:
    log = Log()
    instance = Instance(log)
    assert instance.shared.why_unreadable() is None
    log.append([new_record_version_record(RECORD_VERSION + 2), new_record_version_record(RECORD_VERSION + 1)])
    instance.read()
    assert instance.shared.record_version == RECORD_VERSION + 2
    assert instance.shared.why_unreadable() == (
        f"the upstream has records about groups of version {RECORD_VERSION + 2}, and this release reads versions up to "
        f"{RECORD_VERSION}"
    )
