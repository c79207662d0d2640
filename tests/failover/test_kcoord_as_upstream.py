# SPDX-License-Identifier: Apache-2.0
"""Instances that replace each other, in front of another kcoord."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.failover.next_release import VALUE_VERSION
from tests.failover.stage import GROUPS, on_stage
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.private_network import private_network
from tests.support.waiting import wait_until

UNKNOWN = "this release does not know record type"
UNREADABLE = "of version 2, and this release reads versions up to 1"


@contextmanager
def upstream(folder: Path) -> Iterator[KcoordProcess]:
    (folder / "upstream").mkdir()
    process = KcoordProcess(folder / "upstream", FAST).start()
    try:
        yield process
    finally:
        process.kill()


async def test_instances_that_end_or_stand_still_are_replaced(tmp_path: Path) -> None:
    with upstream(tmp_path) as kcoord:
        async with on_stage(tmp_path, kcoord.address) as stage:
            first, second = stage.instances
            stage.kill(first)
            stage.terminate(second)
            stage.pause(first)
            await stage.judge()


async def test_an_instance_that_is_cut_off_is_replaced(tmp_path: Path) -> None:
    with private_network() as network, upstream(tmp_path) as kcoord:
        network.mark(GROUPS)
        async with on_stage(tmp_path, kcoord.address, GROUPS) as stage:
            stage.cut_off(stage.instances[0], network, [kcoord.port])
            await stage.judge()


def refuses_to_start(instance: KcoordProcess) -> bool:
    """Starts an instance with this release, and returns whether it ends and says that it cannot read the records."""
    instance.module = "kcoord"
    begin = instance.spawn()
    wait_until(lambda: not instance.is_running, "the earlier release does not start")
    return instance.stop() == 1 and UNREADABLE in instance.log[begin:]


async def test_a_rolling_upgrade_loses_nothing_and_an_earlier_release_does_not_come_back(tmp_path: Path) -> None:
    with upstream(tmp_path) as kcoord:
        async with on_stage(tmp_path, kcoord.address) as stage:
            first, second = stage.instances
            stage.upgrade(first)
            assert "records of version 2" not in first.log, "the other instance does not read them"
            assert UNKNOWN not in second.log, "the later release writes what both read"
            os.kill(second.pid, signal.SIGSTOP)
            wait_until(lambda: "Owners write records of version 2" in first.log, "all live instances read version 2")
            os.kill(second.pid, signal.SIGCONT)
            wait_until(lambda: not second.is_running, "the earlier release ends")
            assert UNREADABLE in second.log
            assert second.stop() == 1
            stage.upgrade(second)
            versions = {commit.version for commit in await stage.judge()}
            assert versions == {VALUE_VERSION - 1, VALUE_VERSION}
            assert second.stop() == 0
            assert refuses_to_start(second), "one instance of the later release runs"
            assert first.stop() == 0
            assert refuses_to_start(first), "no instance runs"
