# SPDX-License-Identifier: Apache-2.0
"""kill -9 during a compaction: a random moment after the cleaner's files appear on the disk, the process is killed.

`make soak` repeats it as often as KCOORD_SOAK_ROUNDS says; KCOORD_SOAK_SEED repeats the moments.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from kcoord.cli import main
from tests.soak.crowd import END_SECONDS, PARTITIONS, SETTINGS, TOPIC, Crowd
from tests.soak.streams import read_all
from tests.support.kcoord_process import KcoordProcess

ROUNDS = int(os.environ.get("KCOORD_SOAK_ROUNDS", "1"))
SEED = int(os.environ.get("KCOORD_SOAK_SEED", str(random.randrange(1 << 32))))
KILLS = 8 * ROUNDS
SUFFIXES = (".cleaned", ".swap", ".deleted")
LONGEST_SECONDS = 0.01
"""The longest time from the first file to the kill. A pass over logs of this size takes about as long."""
OFTEN = {
    "log.cleaner.backoff.ms": "20",
    "log.cleaner.min.cleanable.ratio": "0.01",
    "log.cleaner.threads": "1",
    "offsets.topic.segment.bytes": "4096",
    "log.segment.delete.delay.ms": "100",
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KcoordProcess]:
    server = KcoordProcess(tmp_path, SETTINGS | OFTEN).start()
    yield server
    server.kill()


def work_in_progress(data: Path) -> Counter[str]:
    """Returns the number of the cleaner's files in the folders of the coordinator, by suffix."""
    names = (name for folder in data.glob("__consumer_offsets-*") for name in os.listdir(folder))
    return Counter(suffix for name in names for suffix in SUFFIXES if name.endswith(suffix))


def test_kill_9_in_compactions(server: KcoordProcess) -> None:
    chance = random.Random(SEED)
    left_behind: Counter[str] = Counter()
    with Crowd(server, SEED) as crowd:
        crowd.wait_for_commits()
        for kill in range(KILLS):
            suffix = SUFFIXES[kill % 2]
            deadline = time.monotonic() + END_SECONDS
            while not work_in_progress(server.data)[suffix]:
                assert time.monotonic() < deadline, "the cleaner does nothing"
            time.sleep(chance.uniform(0, LONGEST_SECONDS))
            server.kill()
            left_behind += work_in_progress(server.data)
            server.start()
            crowd.check()
        crowd.wait_for_commits()
        crowd.finish()
        numbers = read_all(server.address, TOPIC, PARTITIONS)
        lost = [number for number, place in crowd.records.acknowledged.items() if numbers.get(place) != number]
        assert not lost
    print(f"KCOORD_SOAK_SEED={SEED}", left_behind)
    assert left_behind[".cleaned"] + left_behind[".swap"], "no kill happened during a pass"
    assert server.stop() == 0
    assert not work_in_progress(server.data)
    assert main(["log", "verify", str(server.data)]) == 0
