# SPDX-License-Identifier: Apache-2.0
"""TopicStore follows the metadata image: folders, configs, epochs; internal topics; periodic work."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import partial

import pytest

from kcoord.storage.checkpoints import RECOVERY_POINT_FILE, read_offset_checkpoint
from kcoord.storage.log import Log
from kcoord.storage.log_dir import Identity, LogDir
from kcoord.storage.memory_file_system import Operation
from kcoord.storage.segment import LogConfig
from kcoord.topics import housekeeping
from kcoord.topics.fetch_session import FetchPartition
from kcoord.topics.store import TopicStore
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import Record, encode_batch
from tests.unit.topics.helpers import NODE_ID, NOW_MS, TOPIC, Cluster, batch_of, image_of, topic_id_of

HOUR_MS = 3_600_000
CHECK_MS = 300_000


def folders(cluster: Cluster) -> list[str]:
    return [name for name in cluster.fs.list_dir("data") if "-" in name]


def error_of(call: object, *arguments: object, **named: object) -> Errors:
    with pytest.raises(KafkaError) as caught:
        call(*arguments, **named)  # type: ignore[operator]
    return caught.value.error


# --- following the image ----------------------------------------------------------------------------------------------


def test_a_new_image_makes_the_folders_of_new_partitions() -> None:
    cluster = Cluster(image_of({"a": 2, "b.c-d": 1}))
    assert {"a-0", "a-1", "b.c-d-0"} <= set(folders(cluster))
    assert cluster.log_dir.topic_id("a", 1) == topic_id_of("a")
    cluster.update(image_of({"a": 3, "b.c-d": 1}))
    assert "a-2" in folders(cluster)
    cluster.append(batch_of("x"), "a", 2)
    assert error_of(cluster.append, batch_of("x"), "a", 3) is Errors.UNKNOWN_TOPIC_OR_PARTITION


@pytest.mark.parametrize("ending", ["crash", "restart"])
def test_an_image_takes_effect_although_leader_epochs_cannot_be_stored(ending: str) -> None:
    cluster = Cluster()
    cluster.append(batch_of("a"))

    def no_file(operation: Operation) -> OSError | None:
        is_epochs = "leader-epoch-checkpoint" in operation.path
        return OSError(errno.EMFILE, "too many open files") if is_epochs else None

    cluster.fs.fault = no_file
    cluster.update(image_of({TOPIC: 1, "new": 1}, leader_epoch=1))
    cluster.append(batch_of("b"))
    cluster.update(image_of({TOPIC: 1, "new": 1}, leader_epoch=2))
    cluster.fs.fault = lambda operation: None
    assert cluster.append(batch_of("x"), "new").base_offset == 0
    for _ in range(2):
        ends = [
            cluster.store.end_offset_for_epoch(TOPIC, 0, epoch, current_leader_epoch=-1, now_ms=NOW_MS)
            for epoch in range(3)
        ]
        assert ends == [(0, 1), (1, 2), (2, 2)]
        getattr(cluster, ending)()


def test_folders_are_made_a_few_at_a_time() -> None:
    cluster = Cluster()
    cluster.store.on_metadata_update(image_of({TOPIC: 1, "b": 50}), cluster.now_ms)
    before = len(folders(cluster))
    assert cluster.store.settle_folders(20)
    assert len(folders(cluster)) == before + 20
    cluster.append(batch_of("x"), "b", 49)
    assert "b-49" in folders(cluster)
    assert cluster.log_dir.topic_id("b", 49) == topic_id_of("b")
    assert cluster.store.settle_folders(20)
    assert not cluster.store.settle_folders(20)
    assert len(folders(cluster)) == before + 50


def test_a_start_looks_only_for_missing_folders() -> None:
    cluster = Cluster(image_of({"a": 3}))
    cluster.stop()
    cluster.image = image_of({"a": 5})
    cluster.log_dir = LogDir.open(cluster.fs, "data", Identity("cluster", NODE_ID, "directory"))
    cluster.store = TopicStore(cluster.fs, cluster.log_dir, cluster.config)
    cluster.store.on_metadata_update(cluster.image, cluster.now_ms)
    assert cluster.store.settle_folders(1)
    assert not cluster.store.settle_folders(1)
    assert {"a-3", "a-4"} <= set(folders(cluster))


def test_a_topic_that_is_deleted_before_its_folders_are_made_leaves_none() -> None:
    cluster = Cluster()
    before = folders(cluster)
    cluster.store.on_metadata_update(image_of({TOPIC: 1, "b": 5}), cluster.now_ms)
    cluster.update(image_of({TOPIC: 1}))
    assert folders(cluster) == before


def test_folders_of_a_deleted_topic_are_renamed_some_at_a_time() -> None:
    cluster = Cluster(image_of({"a": 450}))
    cluster.store.on_metadata_update(image_of({}), cluster.now_ms)
    assert error_of(cluster.append, batch_of("x"), "a") is Errors.UNKNOWN_TOPIC_OR_PARTITION
    left = []
    while cluster.store.settle_folders(20):
        left.append(sum(name.startswith("a-") and not name.endswith("-delete") for name in folders(cluster)))
    assert left == [350, 250, 150, 50]


def test_a_topic_that_is_made_again_before_its_folders_are_renamed_begins_empty() -> None:
    cluster = Cluster(image_of({"a": 450}))
    cluster.append(batch_of("x"), "a", 449)
    cluster.store.on_metadata_update(image_of({}), cluster.now_ms)
    cluster.store.on_metadata_update(image_of({"a": 450}, generation=1), cluster.now_ms)
    assert cluster.append(batch_of("y"), "a", 449).base_offset == 0
    assert f"a-449.{topic_id_of('a').hex()}-delete" in folders(cluster)
    assert not any(name.endswith("-stray") for name in folders(cluster))


def test_folders_of_a_deleted_topic_are_removed_at_a_stop() -> None:
    cluster = Cluster(image_of({"a": 450}))
    cluster.store.on_metadata_update(image_of({}), cluster.now_ms)
    cluster.stop()
    assert [name for name in folders(cluster) if name.startswith("a-")] == []


def test_folders_that_a_stop_leaves_out_are_made_by_the_next_start() -> None:
    cluster = Cluster(image_of({}))
    cluster.image = image_of({"a": 50})
    cluster.store.on_metadata_update(cluster.image, cluster.now_ms)
    cluster.stop()
    assert not cluster.store.settle_folders(20)
    assert [name for name in folders(cluster) if name.startswith("a-")] == []
    cluster.start()
    assert len([name for name in folders(cluster) if name.startswith("a-")]) == 50


def test_many_folders_of_a_deleted_topic_are_removed_a_few_at_a_time() -> None:
    cluster = Cluster(image_of({"a": 150}))
    cluster.update(image_of({}))
    left = [sum(name.endswith("-delete") for name in folders(cluster))]
    for elapsed_ms in (60_000, 1_000, 1_000):
        cluster.tick(elapsed_ms)
        left.append(sum(name.endswith("-delete") for name in folders(cluster)))
    assert left == [150, 100, 50, 0]


def test_deleted_topics_are_gone_at_once_and_their_files_later() -> None:
    cluster = Cluster(image_of({"a": 1, "b": 1}))
    cluster.append(batch_of("x"), "a")
    cluster.update(image_of({"b": 1}))
    assert error_of(cluster.append, batch_of("x"), "a") is Errors.UNKNOWN_TOPIC_OR_PARTITION
    retired = f"a-0.{topic_id_of('a').hex()}-delete"
    assert retired in folders(cluster)
    assert "a-0" not in folders(cluster)
    cluster.tick(59_999)
    assert retired in folders(cluster)
    cluster.tick(1)
    assert retired not in folders(cluster)


def test_a_recreated_topic_begins_empty() -> None:
    cluster = Cluster(image_of({"a": 1}))
    cluster.append(batch_of("x", "y"), "a")
    cluster.update(image_of({"a": 1}, generation=1))
    assert cluster.append(batch_of("z"), "a").base_offset == 0
    assert cluster.store.topic_name(topic_id_of("a")) is None
    assert cluster.store.topic_name(topic_id_of("a", 1)) == "a"
    cluster.restart()
    assert cluster.append(batch_of("z"), "a").base_offset == 1


def test_folders_of_unknown_topics_are_set_aside() -> None:
    cluster = Cluster(image_of({"a": 1, "b": 1}))
    cluster.append(batch_of("x"), "a")
    cluster.append(batch_of("x"), "b")
    cluster.stop()
    cluster.image = image_of({"a": 1}, generation=1)
    cluster.start()
    assert f"b-0.{topic_id_of('b').hex()}-stray" in folders(cluster)
    assert f"a-0.{topic_id_of('a').hex()}-stray" in folders(cluster)
    assert cluster.append(batch_of("x"), "a").base_offset == 0


def test_configs_take_effect_at_once() -> None:
    cluster = Cluster()
    batch = batch_of("x" * 500)
    cluster.append(batch)
    cluster.update(image_of({TOPIC: 1}, configs={TOPIC: {"max.message.bytes": "100"}}))
    assert error_of(cluster.append, batch) is Errors.MESSAGE_TOO_LARGE
    cluster.update(image_of({TOPIC: 1}))
    assert cluster.append(batch).base_offset == 1


def test_jitter_makes_partitions_roll_at_different_times() -> None:
    configs = {"segment.ms": "100000", "segment.jitter.ms": "50000"}
    cluster = Cluster(image_of({TOPIC: 4}, configs={TOPIC: configs}))
    for index in range(4):
        cluster.append(batch_of("x"), TOPIC, index)
    ages = [cluster.store.partition(TOPIC, index).log_config.segment_ms for index in range(4)]
    assert len(set(ages)) == 4
    assert all(50_000 < age <= 100_000 for age in ages)


def test_partitions_are_opened_at_their_first_use() -> None:
    cluster = Cluster(image_of({TOPIC: 3}))
    assert all(cluster.store.partition(TOPIC, index).opened is None for index in range(3))
    cluster.append(batch_of("a"), TOPIC, 1)
    assert [cluster.store.partition(TOPIC, index).opened is not None for index in range(3)] == [False, True, False]


# --- internal topics --------------------------------------------------------------------------------------------------


def test_internal_topics_are_readable_and_closed_to_clients() -> None:
    internal = "__consumer_offsets"
    cluster = Cluster(image_of({internal: 2}))
    request = FetchPartition(internal, b"", 0, 0, 1000)
    limits = {"max_bytes": 1000, "whole_first_batch": True, "read_committed": False, "now_ms": NOW_MS}
    assert cluster.store.read(request, **limits).high_watermark == 0  # type: ignore[arg-type]
    log = Log.open(cluster.fs, f"data/{internal}-0", LogConfig(), NOW_MS)
    log.append(encode_batch([Record(b"k", b"v", timestamp_ms=NOW_MS)]), now_ms=NOW_MS)
    cluster.internal_logs[internal, 0] = log
    result = cluster.store.read(request, **limits)  # type: ignore[arg-type]
    assert (result.high_watermark, len(result.records)) == (1, log.size_bytes)
    assert cluster.store.has_partition(internal, 1)
    assert not cluster.store.has_partition(internal, 2)
    last = cluster.store.find_offset(internal, 0, -1, current_leader_epoch=-1, read_committed=False, now_ms=NOW_MS)
    assert last == (-1, 1, 0)
    empty = cluster.store.find_offset(internal, 1, -2, current_leader_epoch=-1, read_committed=False, now_ms=NOW_MS)
    assert empty == (-1, 0, 0)
    ends = cluster.store.end_offset_for_epoch(internal, 0, 0, current_leader_epoch=-1, now_ms=NOW_MS)
    assert ends == (0, 1)
    assert error_of(cluster.append, batch_of("x"), internal) is Errors.INVALID_TOPIC_EXCEPTION
    assert error_of(cluster.store.delete_records, internal, 0, 0, NOW_MS) is Errors.INVALID_TOPIC_EXCEPTION


def test_a_log_that_its_coordinator_has_yet_to_open_is_not_taken_for_an_empty_one() -> None:
    """A client that has read the log before would believe that it was truncated."""
    internal = "__consumer_offsets"
    cluster = Cluster(image_of({internal: 1}))
    Log.open(cluster.fs, f"data/{internal}-0", LogConfig(), NOW_MS)
    end = partial(
        cluster.store.find_offset, internal, 0, -1, current_leader_epoch=-1, read_committed=False, now_ms=NOW_MS
    )
    assert error_of(end) is Errors.NOT_LEADER_OR_FOLLOWER
    request = FetchPartition(internal, b"", 0, 0, 1000)
    fetch = partial(
        cluster.store.read, request, max_bytes=1000, whole_first_batch=True, read_committed=False, now_ms=NOW_MS
    )
    assert error_of(fetch) is Errors.NOT_LEADER_OR_FOLLOWER


# --- periodic work ----------------------------------------------------------------------------------------------------


def segments(cluster: Cluster) -> list[int]:
    return [int(name.removesuffix(".log")) for name in cluster.files() if name.endswith(".log")]


def filled(count: int, **configs: str) -> Cluster:
    """Returns a broker whose partition has `count` segments of one batch each, a minute apart."""
    settings = {"internal.segment.bytes": "300", **{key.replace("_", "."): value for key, value in configs.items()}}
    cluster = Cluster(image_of({TOPIC: 1}, configs={TOPIC: settings}))
    cluster.tick(0)
    for number in range(count):
        cluster.append(batch_of("x" * 100, timestamp_ms=NOW_MS + number * 60_000, producer=(9, 0, number)))
    return cluster


def test_retention_by_time() -> None:
    cluster = filled(4, retention_ms=str(HOUR_MS))
    assert segments(cluster) == [0, 1, 2, 3]
    cluster.tick(HOUR_MS + 60_000)
    assert segments(cluster) == [1, 2, 3]
    assert next(name for name in cluster.files() if name.endswith(".snapshot")) == "00000000000000000001.snapshot"
    cluster.tick(HOUR_MS)
    assert segments(cluster) == [4]
    assert cluster.append(batch_of("y", producer=(9, 0, 4))).base_offset == 4


def test_retention_by_size() -> None:
    cluster = filled(5, retention_ms="-1", retention_bytes="600")
    cluster.tick(CHECK_MS)
    assert segments(cluster) == [2, 3, 4]
    opened = cluster.store.partition(TOPIC, 0).open(cluster.now_ms)
    assert opened.log.start_offset == 2
    assert opened.epochs.entries == [(0, 2)]


def test_small_files_that_cannot_be_removed_do_not_stop_retention(caplog: pytest.LogCaptureFixture) -> None:
    cluster = filled(4, retention_ms=str(HOUR_MS))

    def not_removable(operation: Operation) -> OSError | None:
        is_removal = operation.kind == "remove" and operation.path.endswith(".snapshot")
        return OSError(errno.EIO, "cannot remove") if is_removal else None

    cluster.fs.fault = not_removable
    cluster.store.delete_records(TOPIC, 0, 2, cluster.now_ms)
    cluster.tick(2 * HOUR_MS)
    assert segments(cluster) == [4]
    assert caplog.text.count("cannot remove") == 1
    cluster.fs.fault = lambda operation: None
    cluster.restart()
    cluster.store.partition(TOPIC, 0).open(cluster.now_ms)
    assert not [name for name in cluster.files() if name.endswith(".snapshot")]


def test_files_of_old_segments_stay_for_the_configured_delay() -> None:
    cluster = filled(4, retention_ms=str(HOUR_MS), file_delete_delay_ms=str(2 * CHECK_MS))
    cluster.tick(HOUR_MS + 60_000)
    assert segments(cluster) == [1, 2, 3]
    assert "00000000000000000000.log.deleted" in cluster.files()
    cluster.tick(2 * CHECK_MS - 1)
    assert "00000000000000000000.log.deleted" in cluster.files()
    cluster.tick(1)
    assert not [name for name in cluster.files() if name.startswith("00000000000000000000.")]


def test_files_of_old_segments_are_removed_at_once_if_the_delay_is_0() -> None:
    cluster = filled(4, retention_ms=str(HOUR_MS), file_delete_delay_ms="0")
    cluster.tick(HOUR_MS + 60_000)
    assert not [name for name in cluster.files() if name.endswith(".deleted")]


@pytest.mark.parametrize("ending", ["crash", "restart"])
def test_no_file_of_an_old_segment_outlives_the_broker(ending: str) -> None:
    cluster = filled(4, retention_ms=str(HOUR_MS), file_delete_delay_ms=str(HOUR_MS))
    cluster.tick(HOUR_MS + 60_000)
    getattr(cluster, ending)()
    cluster.store.partition(TOPIC, 0).open(cluster.now_ms)
    assert segments(cluster) == [1, 2, 3]
    assert not [name for name in cluster.files() if name.endswith(".deleted")]


def test_deleting_a_topic_removes_the_files_of_old_segments(caplog: pytest.LogCaptureFixture) -> None:
    cluster = filled(4, retention_ms=str(HOUR_MS), file_delete_delay_ms=str(HOUR_MS))
    cluster.tick(HOUR_MS + 60_000)
    cluster.update(image_of({}))
    cluster.tick(2 * HOUR_MS)
    assert not [path for path in cluster.fs.list_dir("data") if path.startswith(TOPIC)]
    assert caplog.records == []


def test_retention_deletes_no_segments_of_compacted_topics() -> None:
    cluster = filled(3, cleanup_policy="compact", retention_ms="1", retention_bytes="1")
    cluster.tick(HOUR_MS)
    assert segments(cluster) == [0, 1, 2]


def test_segments_of_deleted_records_are_deleted() -> None:
    cluster = filled(3, retention_ms="-1")
    cluster.store.delete_records(TOPIC, 0, 2, cluster.now_ms)
    cluster.tick(CHECK_MS)
    assert segments(cluster) == [2]
    assert [name for name in cluster.files() if name.endswith(".snapshot")] == [f"{2:020d}.snapshot"]


def test_checkpoints_are_written_in_the_background() -> None:
    cluster = Cluster()
    work: list[Callable[[], None]] = []
    cluster.store = TopicStore(
        cluster.fs, cluster.log_dir, cluster.config, in_background=lambda task, done: work.append(task)
    )
    cluster.store.on_metadata_update(cluster.image, cluster.now_ms)
    cluster.append(batch_of("a"))
    cluster.store.tick(cluster.now_ms)
    path = f"data/{RECOVERY_POINT_FILE}"
    before = read_offset_checkpoint(cluster.fs, path)
    operations = cluster.fs.operations
    cluster.now_ms += cluster.config.log_flush_offset_checkpoint_interval_ms
    cluster.store.partition(TOPIC, 0).flush(cluster.store.partition(TOPIC, 0).open(cluster.now_ms), cluster.now_ms)
    flushed = cluster.fs.operations
    assert flushed > operations
    cluster.store.tick(cluster.now_ms)
    assert cluster.fs.operations == flushed
    work.pop()()
    assert read_offset_checkpoint(cluster.fs, path) == before | {(TOPIC, 0): 1}


def test_start_offsets_are_checkpointed() -> None:
    cluster = filled(3, retention_ms="-1")
    cluster.store.delete_records(TOPIC, 0, 1, cluster.now_ms)
    cluster.tick(60_000)
    cluster.crash()
    assert cluster.store.partition(TOPIC, 0).open(cluster.now_ms).log.start_offset == 1


def test_flush_by_time_needs_its_scheduler() -> None:
    image = image_of({TOPIC: 1}, configs={TOPIC: {"flush.ms": "1000"}})
    cluster = Cluster(image, {"log.flush.scheduler.interval.ms": "500"})
    cluster.tick(0)
    cluster.append(batch_of("a"))
    opened = cluster.store.partition(TOPIC, 0).open(cluster.now_ms)
    cluster.tick(500)
    assert opened.log.flushed_offset == 0
    cluster.tick(500)
    assert opened.log.flushed_offset == 1


def test_silent_producers_expire() -> None:
    cluster = Cluster(properties={"producer.id.expiration.ms": "1000"})
    cluster.tick(0)
    cluster.append(batch_of("a", producer=(9, 3, 0)))
    cluster.tick(600_000)
    assert cluster.append(batch_of("b", producer=(9, 0, 55))).base_offset == 1


def test_many_silent_producers_expire_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(housekeeping, "PRODUCERS_PER_TICK", 3)
    cluster = Cluster(image_of({TOPIC: 2}), properties={"producer.id.expiration.ms": "1000"})
    cluster.tick(0)
    for producer_id in range(8):
        cluster.append(batch_of("a", producer=(producer_id, 3, 0)), partition=producer_id % 2)
    opened = [cluster.store.partition(TOPIC, index).open(cluster.now_ms) for index in range(2)]
    left = []
    for elapsed_ms in (600_000, 1, 1, 1):
        cluster.tick(elapsed_ms)
        left.append(sum(len(log.producers.entries) for log in opened))
    assert left == [5, 2, 0, 0]
    cluster.append(batch_of("b", producer=(9, 0, 0)))
    cluster.tick(600_000)
    assert not any(log.producers.entries for log in opened)


def test_retention_works_in_steps_and_survives_a_clock_that_is_set_back() -> None:
    cluster = Cluster(image_of({TOPIC: 120}))
    cluster.tick(0)
    cluster.tick(CHECK_MS)
    opened = [cluster.store.partition(TOPIC, index).opened is not None for index in range(120)]
    assert opened.count(True) == 50
    cluster.tick(1)
    cluster.tick(1)
    assert all(cluster.store.partition(TOPIC, index).opened is not None for index in range(120))
    cluster.tick(-10 * HOUR_MS)
