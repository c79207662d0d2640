# SPDX-License-Identifier: Apache-2.0
"""40,000 hostile requests to a running broker: no crash, no traceback, bounded memory, no effect on other clients.

`KCOORD_FUZZ_REQUESTS` sets another number, `KCOORD_FUZZ_SEED` another seed. `make soak` sends 100,000.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from kcoord_protocol.errors import Errors
from tests.fuzz.live import HEALTHY_TOPIC, Fuzzer, HealthyMember, Outcome, committed_offset_once_loaded, connected
from tests.support.confluent import create_topic
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.memory import resident_kib

REQUESTS = int(os.environ.get("KCOORD_FUZZ_REQUESTS", "40000"))
SEED = int(os.environ.get("KCOORD_FUZZ_SEED", "1"))
MOST_RESIDENT_KIB = 400 * 1024
SETTINGS = {
    **FAST,
    "auto.create.topics.enable": "false",
    "group.consumer.session.timeout.ms": "45000",
    "kcoord.client.assignors.enable": "true",
    "kcoord.log.flush.policy": "os",
    "max.connection.creation.rate": "1000000",
    "metric.reporters": "com.example.Telemetry",
}


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KcoordProcess]:
    process = KcoordProcess(tmp_path, SETTINGS).start()
    yield process
    process.kill()


async def fuzz(port: int) -> tuple[Outcome, int]:
    member = HealthyMember(port)
    life = asyncio.create_task(member.run())
    fuzzing = asyncio.create_task(Fuzzer(port, REQUESTS, SEED).run())
    await asyncio.wait({life, fuzzing}, return_when=asyncio.FIRST_COMPLETED)
    life.cancel()
    with suppress(asyncio.CancelledError):
        await life
    return await fuzzing, member.beats


def test_hostile_requests(broker: KcoordProcess) -> None:
    create_topic(broker.address, HEALTHY_TOPIC, 1)
    create_topic(broker.address, "orders", 3)
    outcome, beats = asyncio.run(fuzz(broker.port))
    print(outcome, beats)
    assert outcome.sent >= REQUESTS
    assert beats > 5
    assert len(outcome.answers) > 30, "most APIs have sent a response"
    assert {Errors.NONE, Errors.INVALID_ASSIGNMENT, Errors.UNKNOWN_MEMBER_ID} <= outcome.installs.keys()
    assert "Traceback" not in broker.log
    assert resident_kib(broker.pid, "VmHWM") < MOST_RESIDENT_KIB
    broker.restart(signal.SIGKILL)

    async def reads_again() -> int:
        async with connected(broker.port) as wire:
            return await committed_offset_once_loaded(wire)

    assert asyncio.run(reads_again()) == 42
    assert "Traceback" not in broker.log
