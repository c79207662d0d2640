# SPDX-License-Identifier: Apache-2.0
"""The offsets of a group at a given time, and the actions of a restore."""

from __future__ import annotations

from pathlib import Path

from kcoord.logtools.restore import (
    DeletedOffset,
    KnownTopic,
    PastOffset,
    RestoreAction,
    batches_in_folder,
    offsets_at,
    plan_restore,
)
from kcoord.storage.file_system import RealFileSystem
from kcoord_protocol.record_batch import Record, encode_batch
from tests.support.coordinator_log import Step, batches_of
from tests.unit.logtools.support import (
    NOW_MS,
    TOPIC_ID,
    commit_record,
    commit_tombstone,
    make_small_folder,
)

TOPICS = {"orders": KnownTopic(TOPIC_ID, 4)}


def batches(*records: Record) -> list[bytes]:
    return [encode_batch([record], base_offset=number) for number, record in enumerate(records)]


def past(offset: int, at_ms: int) -> PastOffset:
    return PastOffset(offset, -1, "", TOPIC_ID, at_ms)


def test_the_last_commit_up_to_the_time_counts() -> None:
    log = batches(
        commit_record("g", "orders", 0, 10, 100),
        commit_record("g", "orders", 0, 20, 200),
        commit_record("g", "orders", 0, 30, 300),
        commit_record("gg", "orders", 0, 99, 150),
    )
    assert offsets_at(log, "g", 200).offsets == {("orders", 0): past(20, 200)}
    assert offsets_at(log, "g", 99).offsets == {}


def test_a_deletion_counts_only_up_to_the_time() -> None:
    log = batches(commit_record("g", "orders", 0, 10, 100), commit_tombstone("g", "orders", 0, 200, "expired"))
    assert offsets_at(log, "g", 250).offsets == {}
    past_offsets = offsets_at(log, "g", 150)
    assert past_offsets.offsets == {("orders", 0): past(10, 100)}
    assert past_offsets.deletions == {("orders", 0): DeletedOffset(200, "expired")}


def test_a_deletion_has_its_principal() -> None:
    tombstone = commit_tombstone("g", "orders", 0, 200, "offset-delete")
    tombstone.headers = [*tombstone.headers, ("kcoord.principal", b"User:eve")]
    log = batches(commit_record("g", "orders", 0, 10, 100), tombstone)
    assert offsets_at(log, "g", 150).deletions == {("orders", 0): DeletedOffset(200, "offset-delete", "User:eve")}


def test_an_offset_that_compaction_has_removed_is_lost() -> None:
    past_offsets = offsets_at(batches(commit_tombstone("g", "orders", 0, 200)), "g", 150)
    assert (past_offsets.offsets, past_offsets.lost) == ({}, {("orders", 0)})
    (row,) = plan_restore(past_offsets, {}, TOPICS)
    assert row.action is RestoreAction.LOST


def test_an_offset_that_was_deleted_while_its_transaction_was_open_is_neither_restored_nor_lost() -> None:
    log = batches_of(
        [Step("commit offsets", producer_id=7), Step("delete offsets"), Step("commit", producer_id=7)],
    )
    for time_ms in (NOW_MS - 1, NOW_MS, NOW_MS + 5):
        past_offsets = offsets_at(log, "g", time_ms)
        assert (past_offsets.offsets, past_offsets.lost) == ({}, set())


def test_each_partition_gets_its_action() -> None:
    log = batches(
        *(commit_record("g", "orders", number, 10, 100) for number in range(3)),
        commit_record("g", "orders", 9, 10, 100),
        commit_record("g", "gone", 0, 10, 100),
        commit_tombstone("g", "orders", 0, 200),
    )
    rows = plan_restore(offsets_at(log, "g", 150), {("orders", 1): 10, ("orders", 2): 30, ("orders", 3): 5}, TOPICS)
    assert [(row.topic, row.partition, row.now, row.action) for row in rows] == [
        ("gone", 0, None, RestoreAction.TOPIC_GONE),
        ("orders", 0, None, RestoreAction.RESTORE),
        ("orders", 1, 10, RestoreAction.SAME),
        ("orders", 2, 30, RestoreAction.CHANGE),
        ("orders", 3, 5, RestoreAction.NEWER),
        ("orders", 9, None, RestoreAction.TOPIC_GONE),
    ]
    assert rows[1].deletion == DeletedOffset(200)


def test_offsets_of_another_topic_of_that_name_are_not_restored() -> None:
    log = batches(commit_record("g", "orders", 0, 10, 100))
    (row,) = plan_restore(offsets_at(log, "g", 150), {}, {"orders": KnownTopic(bytes([9]) * 16, 4)})
    assert row.action is RestoreAction.TOPIC_MADE_AGAIN


def test_the_history_can_come_from_a_folder(tmp_path: Path) -> None:
    folder = f"{tmp_path}/data"
    make_small_folder(folder)
    past_offsets = offsets_at(batches_in_folder(RealFileSystem(), folder, "readers"), "readers", NOW_MS + 9)
    assert {key: offset.offset for key, offset in past_offsets.offsets.items()} == {("orders", 0): 8, ("orders", 1): 9}
