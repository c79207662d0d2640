# SPDX-License-Identifier: Apache-2.0
"""Instances that replace each other, in front of another kcoord."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.failover.stage import GROUPS, on_stage
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.private_network import private_network


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
