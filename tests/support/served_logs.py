# SPDX-License-Identifier: Apache-2.0
"""Brokers that serve given logs: their files replace those of a topic while the broker is stopped.

The topic is not `__consumer_offsets`, so no coordinator loads the logs or writes to them.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Final

from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.model import NewTopic
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess

TOPIC: Final = "logs-of-groups"
_KEPT: Final = {"cleanup.policy": "delete", "retention.ms": "-1", "max.message.bytes": str(64 << 20)}
_METADATA: Final = "partition.metadata"
_CHECKPOINTS: Final = ("recovery-point-offset-checkpoint", "replication-offset-checkpoint", ".kafka_cleanshutdown")

Fill = Callable[[Path], None]
"""Writes the folders TOPIC-0, TOPIC-1, ... into an empty folder."""


def serve_by_kcoord(folder: Path, partitions: int, fill: Fill) -> KcoordProcess:
    """Returns a running broker of kcoord that has the logs."""
    broker = KcoordProcess(folder).start()
    try:
        asyncio.run(create_topic(broker.address, partitions))
        broker.stop()
        replace_logs(broker.data, fill, folder / "filled")
        return broker.start()
    except BaseException:
        broker.kill()
        raise


def serve_by_kafka(jars: KafkaJars, folder: Path, partitions: int, fill: Fill) -> KafkaBroker:
    """Returns a running broker of Apache Kafka that has the logs."""
    first = KafkaBroker(jars, folder)
    try:
        asyncio.run(create_topic(first.address, partitions))
    finally:
        first.stop()
    replace_logs(first.data, fill, folder / "filled")
    return KafkaBroker(jars, folder)


async def create_topic(address: str, partitions: int) -> None:
    async with AdminClient(bootstrap_servers=address) as admin:
        (await admin.create_topics([NewTopic(TOPIC, partitions, 1, configs=_KEPT)])).all()


def replace_logs(data: Path, fill: Fill, filled: Path) -> None:
    """Replaces the logs of the topic in a data folder of a stopped broker. Their topic ids stay."""
    filled.mkdir()
    fill(filled)
    for source in filled.iterdir():
        target = data / source.name
        metadata = (target / _METADATA).read_bytes() if (target / _METADATA).exists() else None
        shutil.rmtree(target, ignore_errors=True)
        shutil.move(source, target)
        if metadata is not None:
            (target / _METADATA).write_bytes(metadata)
    for name in _CHECKPOINTS:
        (data / name).unlink(missing_ok=True)
