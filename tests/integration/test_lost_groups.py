# SPDX-License-Identifier: Apache-2.0
"""A group whose tombstone is in the log after its offsets.

The broker lists the group, its offsets can be deleted, and they expire: in one process or with two workers, from the
log or from a snapshot.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path

import pytest

from kcoord.client.admin.client import AdminClient
from kcoord.client.types import TopicPartition
from kcoord.coordinator.group.records import TombstoneReason, new_classic_group_tombstone
from kcoord.runtime.serde import partition_for
from kcoord_protocol.record_batch import encode_batch
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until
from tests.unit.logtools.support import (
    NODE_ID,
    append,
    commit_record,
    metadata_records,
    open_folder,
    record_of,
    write_metadata,
)

GROUPS = ("lost", "mislaid", "expired")
SHARDS = 8
LONG_AGO_MS = 1_000_000_000_000
SETTINGS = {**FAST, "node.id": str(NODE_ID), "offsets.retention.check.interval.ms": "500"}
FOREVER_MINUTES = str(2**31 - 1)
ORDERS = [TopicPartition("orders", 0), TopicPartition("orders", 1)]


def make_folder(path: Path) -> None:
    """Writes a data folder in which each group has two offsets, and then its tombstone."""
    log_dir = open_folder(str(path))
    write_metadata(log_dir, metadata_records(offsets_partitions=SHARDS))
    for group in GROUPS:
        commits = [commit_record(group, "orders", number, 40 + number, LONG_AGO_MS) for number in range(2)]
        end = record_of(new_classic_group_tombstone(group, TombstoneReason.GROUP_DELETE), LONG_AGO_MS)
        batches = [encode_batch([record]) for record in (*commits, end)]
        append(log_dir, "__consumer_offsets", partition_for(group, SHARDS), batches)
    log_dir.close()


async def states(address: str) -> Mapping[str, tuple[str, str]]:
    async with AdminClient(bootstrap_servers=address) as admin:
        listed = await admin.list_groups()
        return {group.group_id: (group.state, group.protocol_type) for group in listed}


async def delete(address: str) -> Mapping[str, list[int]]:
    """Deletes one offset of a group and all offsets of another; returns the remaining offsets by group."""
    async with AdminClient(bootstrap_servers=address) as admin:
        (await admin.delete_consumer_group_offsets("lost", ORDERS[:1])).all()
        (await admin.delete_consumer_groups(["mislaid"])).all()
        listed = (await admin.list_consumer_group_offsets(list(GROUPS))).all()
        return {
            group: [offset.offset for offset in offsets.values() if offset is not None]
            for group, offsets in listed.items()
        }


@pytest.mark.parametrize("workers", [1, 2])
def test_a_lost_group_is_listed_deleted_and_expires(tmp_path: Path, workers: int) -> None:
    threads = {"group.coordinator.threads": str(workers)} if workers > 1 else {}
    broker = KcoordProcess(tmp_path, {**SETTINGS, **threads, "offsets.retention.minutes": FOREVER_MINUTES})
    make_folder(broker.data)
    try:
        broker.start()
        assert asyncio.run(states(broker.address)) == dict.fromkeys(GROUPS, ("Empty", ""))
        assert asyncio.run(delete(broker.address)) == {"lost": [41], "mislaid": [], "expired": [40, 41]}
        # An orderly stop writes snapshots, which the next start loads.
        assert broker.stop() == 0
        broker.start()
        assert asyncio.run(states(broker.address)) == dict.fromkeys(("lost", "expired"), ("Empty", ""))
        broker.stop()
        broker.overrides["offsets.retention.minutes"] = "1"
        broker.start()
        wait_until(lambda: asyncio.run(states(broker.address)) == {}, "the offsets expire, and the groups with them")
    finally:
        broker.stop()
