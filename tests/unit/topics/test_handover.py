# SPDX-License-Identifier: Apache-2.0
"""A partition moves from one worker to another while both run: its data stays, and only one worker has the log."""

from __future__ import annotations

import pytest

from kcoord.config import BrokerConfig
from kcoord.metadata.image import MetadataImage
from kcoord.storage.log_dir import Identity
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord.storage.worker_log_dir import SharedLogDir, WorkerLogDir
from kcoord.topics.fetch_session import FetchPartition
from kcoord.topics.store import TopicStore
from kcoord_protocol.errors import Errors, KafkaError
from tests.unit.topics.helpers import NOW_MS, TOPIC, batch_of, image_of

OLD, NEW = 1, 2


class Workers:
    """Two brokers that share a data folder. A broker gets the new image when a test calls `publish`."""

    def __init__(self) -> None:
        self.fs = MemoryFileSystem()
        self.shared = SharedLogDir.open(self.fs, "data", Identity("cluster", OLD, "directory"))
        self.log_dirs: dict[int, WorkerLogDir] = {}
        self.stores: dict[int, TopicStore] = {}
        self.image = image_of({TOPIC: 1}, leader=OLD)
        for broker_id in (OLD, NEW):
            self.start(broker_id, is_restart=False)

    def start(self, broker_id: int, *, is_restart: bool = True) -> None:
        log_dir = self.log_dirs[broker_id] = WorkerLogDir.join(self.shared, broker_id, is_restart=is_restart)
        config = BrokerConfig.from_properties({"node.id": str(broker_id)})
        self.stores[broker_id] = TopicStore(self.fs, log_dir, config, settles_folder=False)
        self.publish(broker_id)

    def die(self, broker_id: int) -> None:
        log_dir = self.log_dirs[broker_id]
        log_dir._lock.release()
        log_dir._unlock(list(log_dir._locks))

    def start_all(self) -> None:
        """Kills all workers and their supervisor, and starts them again."""
        for broker_id in (OLD, NEW):
            self.die(broker_id)
        self.shared._lock.release()
        self.shared = SharedLogDir.open(self.fs, "data", Identity("cluster", OLD, "directory"))
        for broker_id in (OLD, NEW):
            self.start(broker_id, is_restart=False)

    def publish(self, *broker_ids: int) -> None:
        for broker_id in broker_ids:
            self.stores[broker_id].on_metadata_update(self.image, NOW_MS)

    def lead(self, leader: int, epoch: int) -> MetadataImage:
        self.image = image_of({TOPIC: 1}, leader=leader, leader_epoch=epoch)
        return self.image

    def append(self, broker_id: int, *values: str, producer: tuple[int, int, int] = (-1, -1, -1)) -> int:
        batch = batch_of(*values, producer=producer)
        return self.stores[broker_id].append(TOPIC, 0, batch, requires_all=True, now_ms=NOW_MS).base_offset

    def end_offset(self, broker_id: int) -> int:
        return self.stores[broker_id].partition(TOPIC, 0).open(NOW_MS).log.end_offset

    def refused(self, broker_id: int) -> Errors:
        with pytest.raises(KafkaError) as caught:
            self.append(broker_id, "refused")
        return Errors(caught.value.error)


def test_the_new_leader_continues_at_the_end_of_the_log() -> None:
    workers = Workers()
    workers.append(OLD, "a", "b", producer=(7, 0, 0))
    workers.lead(NEW, 1)
    workers.publish(OLD, NEW)
    assert workers.refused(OLD) is Errors.NOT_LEADER_OR_FOLLOWER
    assert workers.append(NEW, "c", producer=(7, 0, 2)) == 2
    assert workers.append(NEW, "c", producer=(7, 0, 2)) == 2, "the producer state was handed over too"
    assert workers.stores[NEW].end_offset_for_epoch(TOPIC, 0, 0, current_leader_epoch=1, now_ms=NOW_MS) == (0, 2)


def test_the_new_leader_waits_for_the_old_one() -> None:
    workers = Workers()
    workers.append(OLD, "a")
    workers.lead(NEW, 1)
    workers.publish(NEW)
    assert workers.refused(NEW) is Errors.NOT_LEADER_OR_FOLLOWER
    assert workers.append(OLD, "b") == 1, "the old leader has not seen the change, and no other broker writes"
    workers.publish(OLD)
    assert workers.append(NEW, "c") == 2


def test_deleted_records_stay_deleted_when_the_old_leader_dies() -> None:
    workers = Workers()
    workers.append(OLD, "a", "b")
    workers.stores[OLD].delete_records(TOPIC, 0, 1, NOW_MS)
    workers.stores[OLD].note_deleted()
    workers.stores[OLD].keep_deleted()
    workers.lead(NEW, 1)
    workers.publish(NEW)
    workers.die(OLD)
    partition = workers.stores[NEW].partition(TOPIC, 0).open(NOW_MS)
    assert (partition.log.start_offset, partition.log.end_offset) == (1, 2)
    workers.start(OLD)
    assert workers.refused(OLD) is Errors.NOT_LEADER_OR_FOLLOWER
    assert workers.append(NEW, "c") == 2


def test_the_new_leader_uses_the_entries_of_a_leader_that_died_and_was_restarted() -> None:
    workers = Workers()
    workers.append(OLD, "a", "b")
    workers.stores[OLD].delete_records(TOPIC, 0, 1, NOW_MS)
    workers.stores[OLD].note_deleted()
    workers.stores[OLD].keep_deleted()
    workers.lead(NEW, 1)
    workers.die(OLD)
    workers.start(OLD)
    workers.publish(NEW)
    partition = workers.stores[NEW].partition(TOPIC, 0).open(NOW_MS)
    assert (partition.log.start_offset, partition.log.end_offset) == (1, 2)


def test_leadership_moves_back_and_forth() -> None:
    workers = Workers()
    for epoch in range(1, 6):
        leader, other = (NEW, OLD) if epoch % 2 else (OLD, NEW)
        workers.lead(leader, epoch)
        workers.publish(OLD, NEW)
        assert workers.append(leader, f"{epoch}") == epoch - 1
        assert workers.refused(other) is Errors.NOT_LEADER_OR_FOLLOWER
    assert workers.stores[NEW].end_offset_for_epoch(TOPIC, 0, 3, current_leader_epoch=5, now_ms=NOW_MS) == (3, 3)


def test_parked_fetches_are_woken_and_fail_with_not_leader() -> None:
    workers = Workers()
    woken: list[tuple[str, int]] = []
    store = workers.stores[OLD]
    store.fetches.on_change = lambda topic, partition: woken.append((topic, partition))  # type: ignore[method-assign]
    workers.lead(NEW, 1)
    workers.publish(OLD)
    assert woken == [(TOPIC, 0)]
    request = FetchPartition(TOPIC, bytes(16), 0, 0, 100)
    with pytest.raises(KafkaError) as caught:
        store.read(request, max_bytes=100, whole_first_batch=True, read_committed=False, now_ms=NOW_MS)
    assert caught.value.error == Errors.NOT_LEADER_OR_FOLLOWER
    assert store.leader_of(TOPIC, 0) == (NEW, 1)


def test_a_folder_of_a_deleted_topic_is_not_used_for_a_new_topic_of_that_name() -> None:
    workers = Workers()
    workers.append(OLD, "old")
    workers.image = image_of({})
    workers.publish(NEW)
    workers.die(OLD)
    workers.image = image_of({TOPIC: 1}, leader=NEW, generation=1)
    workers.publish(NEW)
    assert workers.append(NEW, "new") == 0
    assert any(name.endswith("-stray") for name in workers.fs.list_dir("data"))


# --- a topic that is deleted and created again ------------------------------------------------------------------------


def delete_before(workers: Workers, broker_id: int, offset: int) -> None:
    """Deletes the records before `offset`. The new start and the recovery point are durable."""
    store = workers.stores[broker_id]
    store.delete_records(TOPIC, 0, offset, NOW_MS)
    store.note_deleted()
    store.keep_deleted()
    workers.log_dirs[broker_id].checkpoint()


def offsets(workers: Workers, broker_id: int) -> tuple[int, int]:
    log = workers.stores[broker_id].partition(TOPIC, 0).open(NOW_MS).log
    return log.start_offset, log.end_offset


def move_from_a_dead_leader(workers: Workers) -> None:
    """NEW opens a log with deleted records after OLD, its leader, has died."""
    workers.append(OLD, "a", "b", "c")
    delete_before(workers, OLD, 2)
    workers.lead(NEW, 1)
    workers.publish(NEW)
    workers.die(OLD)
    assert offsets(workers, NEW) == (2, 3)


def recreate(workers: Workers, *running: int) -> None:
    """Deletes the topic and creates it again. NEW leads it."""
    for image in (image_of({}), image_of({TOPIC: 1}, leader=NEW, generation=1)):
        workers.image = image
        workers.publish(*running)
        for broker_id in running:
            workers.stores[broker_id].settle_folders(1)


@pytest.mark.parametrize("is_restarted", [False, True])
def test_entries_of_a_dead_leader_do_not_apply_to_a_new_topic_after_a_start(is_restarted: bool) -> None:
    workers = Workers()
    move_from_a_dead_leader(workers)
    if is_restarted:
        workers.start(OLD)
    recreate(workers, NEW, *([OLD] if is_restarted else []))
    assert workers.append(NEW, "new") == 0
    workers.start_all()
    assert offsets(workers, NEW) == (0, 1)


def test_entries_of_a_dead_leader_do_not_apply_to_a_new_topic_that_moves() -> None:
    workers = Workers()
    move_from_a_dead_leader(workers)
    recreate(workers, NEW)
    workers.append(NEW, "new")
    workers.image = image_of({TOPIC: 1}, leader=OLD, leader_epoch=1, generation=1)
    workers.die(NEW)
    workers.start(OLD)
    assert offsets(workers, OLD) == (0, 1)


def test_a_restarted_worker_does_not_hand_over_a_new_topic_with_entries_of_the_old_one() -> None:
    workers = Workers()
    move_from_a_dead_leader(workers)
    recreate(workers, NEW)
    workers.start(OLD)
    assert workers.append(NEW, "new") == 0
    assert offsets(workers, NEW) == (0, 1)


@pytest.mark.parametrize("is_late", [False, True])
def test_what_a_worker_inherited_does_not_apply_to_a_new_topic(is_late: bool) -> None:
    """`is_late`: the worker learns of the deletion, the new topic and the move at once."""
    workers = Workers()
    workers.append(OLD, "a", "b", "c")
    delete_before(workers, OLD, 2)
    workers.lead(NEW, 1)
    workers.start_all()
    recreate(workers, NEW, *([] if is_late else [OLD]))
    assert workers.append(NEW, "new") == 0
    workers.image = image_of({TOPIC: 1}, leader=OLD, leader_epoch=1, generation=1)
    workers.die(NEW)
    workers.publish(OLD)
    assert offsets(workers, OLD) == (0, 1)


def test_a_restarted_leader_keeps_the_start_of_a_new_topic_if_another_checkpoint_has_the_old_topic() -> None:
    """The checkpoint of the cleaner was last written when this worker led the old topic."""
    workers = Workers()
    workers.append(OLD, "old")
    workers.log_dirs[OLD].note_cleaned(TOPIC, 0, 1)
    recreate(workers, NEW, OLD)
    workers.image = image_of({TOPIC: 1}, leader=OLD, generation=2)
    workers.publish(OLD, NEW)
    workers.append(OLD, "a", "b", "c")
    delete_before(workers, OLD, 2)
    workers.die(OLD)
    workers.start(OLD)
    assert offsets(workers, OLD) == (2, 3)


def test_a_worker_that_learns_late_of_a_deletion_keeps_the_folder_of_the_new_topic() -> None:
    workers = Workers()
    workers.append(OLD, "old")
    workers.start_all()
    recreate(workers, NEW)
    assert workers.append(NEW, "new") == 0
    workers.publish(OLD)
    workers.stores[OLD].settle_folders(1)
    workers.start_all()
    assert offsets(workers, NEW) == (0, 1)


def test_a_new_topic_waits_for_the_worker_that_has_the_log_of_the_deleted_one_open() -> None:
    workers = Workers()
    workers.append(OLD, "old")
    recreate(workers, NEW)
    assert workers.refused(NEW) is Errors.NOT_LEADER_OR_FOLLOWER
    workers.publish(OLD)
    workers.stores[OLD].settle_folders(1)
    assert workers.append(NEW, "new") == 0
    assert not any(name.endswith("-stray") for name in workers.fs.list_dir("data"))


def test_a_restarted_worker_waits_for_the_worker_that_has_the_log_of_a_deleted_topic_open() -> None:
    workers = Workers()
    workers.append(OLD, "old")
    workers.die(NEW)
    workers.image = image_of({TOPIC: 1}, leader=NEW, generation=1)
    workers.start(NEW)
    assert workers.refused(NEW) is Errors.NOT_LEADER_OR_FOLLOWER
    workers.die(OLD)
    assert workers.append(NEW, "new") == 0


def test_a_restarted_worker_does_not_hand_over_a_topic_that_it_never_led() -> None:
    """It led a deleted topic of that name."""
    workers = Workers()
    workers.append(OLD, "old")
    recreate(workers, OLD, NEW)
    workers.append(NEW, "a", "b", "c")
    delete_before(workers, NEW, 2)
    workers.die(OLD)
    workers.die(NEW)
    workers.start(OLD)
    workers.start(NEW)
    assert offsets(workers, NEW) == (2, 3)


def test_a_new_topic_that_is_handed_over_has_no_offsets_from_before_the_start() -> None:
    """The folder's own checkpoints have those of the deleted topic."""
    workers = Workers()
    workers.append(OLD, "a", "b", "c")
    delete_before(workers, OLD, 2)
    workers.start_all()
    for image in (image_of({}), image_of({TOPIC: 1}, leader=OLD, generation=1)):
        workers.image = image
        workers.publish(OLD, NEW)
    workers.append(OLD, "new")
    workers.image = image_of({TOPIC: 1}, leader=NEW, leader_epoch=1, generation=1)
    workers.publish(OLD, NEW)
    assert offsets(workers, NEW) == (0, 1)


def test_a_worker_that_learns_late_of_a_move_does_not_use_what_it_inherited_for_a_new_topic() -> None:
    workers = Workers()
    workers.append(OLD, "a", "b", "c")
    delete_before(workers, OLD, 2)
    workers.start_all()
    late = [image_of({}), image_of({TOPIC: 1}, leader=NEW, generation=1)]
    last = image_of({TOPIC: 1}, leader=OLD, leader_epoch=1, generation=1)
    for image in (*late, last):
        workers.image = image
        workers.publish(OLD)
        workers.stores[OLD].settle_folders(1)
    for image in late:
        workers.image = image
        workers.publish(NEW)
    assert offsets(workers, NEW) == (0, 0)
    workers.image = last
    workers.publish(NEW)
    assert workers.append(OLD, "new") == 0


def test_a_late_leader_makes_its_folder_again_with_the_id_of_its_topic() -> None:
    """Without the id, a new topic of that name would take the records for its own."""
    workers = Workers()
    workers.stores[OLD].settle_folders(1)
    workers.die(NEW)
    workers.image = image_of({TOPIC: 1}, leader=NEW, generation=1)
    workers.start(NEW)
    assert workers.append(OLD, "old") == 0
    workers.start_all()
    assert offsets(workers, NEW) == (0, 0)


def test_a_late_leader_does_not_write_to_the_log_of_a_new_topic() -> None:
    workers = Workers()
    workers.stores[OLD].settle_folders(1)
    recreate(workers, NEW)
    workers.append(NEW, "new")
    workers.die(NEW)
    assert workers.refused(OLD) is Errors.NOT_LEADER_OR_FOLLOWER
    workers.start(NEW)
    assert offsets(workers, NEW) == (0, 1)
