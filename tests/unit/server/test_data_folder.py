# SPDX-License-Identifier: Apache-2.0
"""Which thread syncs the closed segments of the logs in a data folder, and which worker may create a log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

import pytest

from kcoord.config import BrokerConfig
from kcoord.server.disk.data_folder import DataFolder
from kcoord.storage.errors import PartitionHeldError
from kcoord.storage.log import Log
from kcoord.storage.log_dir import Identity
from kcoord.storage.memory_file_system import MemoryFileSystem
from kcoord.storage.segment import LogConfig
from kcoord.storage.worker_log_dir import SharedLogDir, WorkerLogDir
from tests.storage.support import NOW_MS, batch

SEGMENT_BYTES = 8 << 20
TOPIC = "__consumer_offsets"


def metadata_log(folder: DataFolder) -> Log:
    return folder.metadata_logs.open(0)


def offsets_log(folder: DataFolder) -> Log:
    return folder.shard_logs(TOPIC, LogConfig(segment_bytes=SEGMENT_BYTES), lambda: NOW_MS).open(0)


@pytest.mark.parametrize("open_log", [metadata_log, offsets_log])
@pytest.mark.parametrize(("policy", "waits"), [("os", False), ("fsync", True)])
def test_an_append_that_rolls_a_log_waits_for_the_disk_only_in_the_writer_thread(
    policy: str, waits: bool, open_log: Callable[[DataFolder], Log]
) -> None:
    async def roll() -> None:
        config = BrokerConfig.from_properties(
            {
                "log.dirs": "data",
                "kcoord.log.flush.policy": policy,
                "metadata.log.segment.bytes": str(SEGMENT_BYTES),
            }
        )
        folder = DataFolder(config, NOW_MS, MemoryFileSystem())
        log = open_log(folder)
        log.append(batch(0, value_size=SEGMENT_BYTES - 100), now_ms=NOW_MS)
        log.append(batch(1, value_size=1000), now_ms=NOW_MS)
        assert len(log.segments) == 2
        assert (log.flushed_offset == 1) is waits
        async with asyncio.timeout(30):
            while log.flushed_offset < 1:
                await asyncio.sleep(0)

    asyncio.run(roll())


def test_a_shard_without_a_log_stays_with_its_leader_until_it_is_handed_over() -> None:
    """The leader may create the log at any time until it learns that another worker leads the shard."""
    fs = MemoryFileSystem()
    shared = SharedLogDir.open(fs, "data", Identity("cluster", 1, "directory"))
    config = BrokerConfig.from_properties({"log.dirs": "data"})
    old, new = (
        DataFolder(
            config,
            NOW_MS,
            fs,
            log_dir=partial(WorkerLogDir.join, shared, number, is_restart=False),
            owns_metadata=False,
            settles_folder=False,
        ).shard_logs(TOPIC, LogConfig(), lambda: NOW_MS)
        for number in range(2)
    )
    assert not old.exists(0)
    assert new.exists(0), "a load waits for the old leader"
    with pytest.raises(PartitionHeldError):
        new.open(0)
    old.open(0).append(batch(0), now_ms=NOW_MS)
    old.hand_over([0])
    assert new.open(0).end_offset == 1
