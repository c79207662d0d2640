# SPDX-License-Identifier: Apache-2.0
"""Replays dialogues that were recorded from Apache Kafka 4.3.1 and 4.4.0.

The kcoord process behaves like that release. The player has a codec of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.kcoord_process import KcoordProcess
from tests.support.shared import shared

PLAY_SECONDS = 300

EXPLAINED = {("join-validation", 11), ("join-validation", 12)}
"""Steps whose response differs on purpose: a join with a rebalance timeout of 0 or -2 (docs/differences.md)."""

SETTINGS = {
    "auto.create.topics.enable": "false",
    "group.consumer.assignment.interval.ms": "0",
    "group.consumer.heartbeat.interval.ms": "5000",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.min.session.timeout.ms": "500",
    "group.consumer.session.timeout.ms": "45000",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "500",
    "offsets.retention.check.interval.ms": "86400000",
    "offsets.topic.num.partitions": "4",
}


@pytest.mark.parametrize(("release", "folder"), [("4.3", "golden"), ("4.4", "golden-4.4")])
def test_responses_are_those_of_the_recorded_dialogues(tmp_path: Path, release: str, folder: str) -> None:
    player = shared("conformance", "golden.py")
    broker = KcoordProcess(tmp_path, {**SETTINGS, "kcoord.release": release}).start()
    try:
        played = subprocess.run(
            [sys.executable, str(player), broker.address, "-v"],
            capture_output=True,
            text=True,
            timeout=PLAY_SECONDS,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1", "GOLDEN": folder},
        )
    finally:
        assert broker.stop() == 0, broker.log
    recorded = {path.stem for path in (player.parent / folder).glob("*.json")}
    assert recorded
    answered, different = _verdicts(played.stdout)
    report = f"{played.stdout}\n{played.stderr}\n{broker.log}"
    assert recorded == answered, report
    assert different == EXPLAINED, report


def _verdicts(output: str) -> tuple[set[str], set[tuple[str, int]]]:
    """Returns the names of the dialogues that were played to the end, and the steps, from 1, with other responses."""
    answered: set[str] = set()
    different: set[tuple[str, int]] = set()
    name = ""
    for line in output.splitlines():
        if verdict := re.match(r"(?:ok|FAIL) +([a-z0-9-]+): \d+ steps", line):
            name = verdict[1]
            answered.add(name)
        elif step := re.match(r" +step (\d+) ", line):
            different.add((name, int(step[1])))
    return answered, different
