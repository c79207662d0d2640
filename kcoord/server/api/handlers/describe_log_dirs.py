# SPDX-License-Identifier: Apache-2.0
"""DescribeLogDirs (KIP-113, KIP-827): the data folder, how full its volume is, and how large the logs in it are that
this broker leads. There is one copy of each log, so those of the other replicas are not told of.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord.storage.file_system import FileSystem
from kcoord.storage.segment import LOG_SUFFIX
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import DescribeLogDirsRequest, DescribeLogDirsResponse

API_KEY = ApiKey.DESCRIBE_LOG_DIRS
VERSIONS = range(1, 6)

UNKNOWN_BYTES = -1

Result = DescribeLogDirsResponse.DescribeLogDirsResult
Topic = DescribeLogDirsResponse.DescribeLogDirsTopic
Partition = DescribeLogDirsResponse.DescribeLogDirsPartition
Sizes = Mapping[tuple[str, int], int]


def handle(broker: Broker, context: RequestContext, request: DescribeLogDirsRequest) -> Reply[DescribeLogDirsResponse]:
    asked = None if request.topics is None else {one.topic: frozenset(one.partitions) for one in request.topics}
    wanted = [key for key in _led_by(broker) if asked is None or key[1] in asked.get(key[0], ())]
    return broker.spawn(_describe(broker, wanted))


def _led_by(broker: Broker) -> list[tuple[str, int]]:
    return [
        (name, partition.partition_id)
        for name, topic in sorted(broker.image.topics.items())
        for partition in topic.partitions
        if partition.leader == broker.node_id
    ]


def log_folder(broker: Broker) -> str:
    return os.path.abspath(broker.config.data_folders[0])


async def _describe(broker: Broker, wanted: list[tuple[str, int]]) -> DescribeLogDirsResponse:
    sizes = {key: size for key in wanted if (size := broker.topics.open_log_size(*key)) is not None}
    closed = {key: broker.topics.folder_of(*key) for key in wanted if key not in sizes}
    if closed:
        # As many folders to look at as there are partitions that nobody uses: not in the event loop.
        sizes |= await asyncio.to_thread(_sizes_on_disk, broker.topics.file_system, closed)
    topics: dict[str, Topic] = {}
    for name, partition in wanted:
        topic = topics.setdefault(name, Topic(name=name))
        topic.partitions.append(Partition(partition_index=partition, partition_size=sizes[name, partition]))
    folder = log_folder(broker)
    total, usable = _volume(folder)
    result = Result(log_dir=folder, topics=list(topics.values()), total_bytes=total, usable_bytes=usable)
    return DescribeLogDirsResponse(results=[result])


def _sizes_on_disk(file_system: FileSystem, folders: Mapping[tuple[str, int], str]) -> Sizes:
    return {key: _size_on_disk(file_system, folder) for key, folder in folders.items()}


def _size_on_disk(file_system: FileSystem, folder: str) -> int:
    """0 where nothing was written yet, or where the folder goes at this moment."""
    try:
        names = [name for name in file_system.list_dir(folder) if name.endswith(LOG_SUFFIX)]
        return sum(file_system.size(f"{folder}/{name}") for name in names)
    except FileNotFoundError:
        return 0


def _volume(folder: str) -> tuple[int, int]:
    """Size and free space of the volume of the folder; -1 each where the data is in memory."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return UNKNOWN_BYTES, UNKNOWN_BYTES
    return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize


def error_response(request: DescribeLogDirsRequest, error: KafkaError, version: int) -> DescribeLogDirsResponse:
    return DescribeLogDirsResponse(error_code=error.error)
