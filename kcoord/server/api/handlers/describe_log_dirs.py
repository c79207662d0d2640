# SPDX-License-Identifier: Apache-2.0
"""DescribeLogDirs (KIP-113, KIP-827).

The response has the data folder, the size of its volume, and the sizes of the logs that this broker leads.

There is one copy of each log, so the other replicas are not listed.
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
from kcoord_protocol.acls import AclOperation
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
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.DESCRIBE)
    asked = None if request.topics is None else {topic.topic: frozenset(topic.partitions) for topic in request.topics}
    partitions = [key for key in _led_by(broker) if asked is None or key[1] in asked.get(key[0], ())]
    return broker.spawn(_describe(broker, partitions))


def _led_by(broker: Broker) -> list[tuple[str, int]]:
    return [
        (name, partition.partition_id)
        for name, topic in sorted(broker.image.topics.items())
        for partition in topic.partitions
        if partition.leader == broker.node_id
    ]


def log_folder(broker: Broker) -> str:
    return os.path.abspath(broker.config.data_folders[0])


async def _describe(broker: Broker, partitions: list[tuple[str, int]]) -> DescribeLogDirsResponse:
    sizes = {key: size for key in partitions if (size := broker.topics.open_log_size(*key)) is not None}
    closed = {key: broker.topics.folder_of(*key) for key in partitions if key not in sizes}
    if closed:
        # There may be thousands of closed partitions. A thread reads their folders, so that the event loop continues.
        sizes |= await asyncio.to_thread(_sizes_on_disk, broker.topics.file_system, closed)
    topics: dict[str, Topic] = {}
    for name, partition in partitions:
        topic = topics.setdefault(name, Topic(name=name))
        topic.partitions.append(Partition(partition_index=partition, partition_size=sizes[name, partition]))
    folder = log_folder(broker)
    total, usable = _volume(folder)
    result = Result(log_dir=folder, topics=list(topics.values()), total_bytes=total, usable_bytes=usable)
    return DescribeLogDirsResponse(results=[result])


def _sizes_on_disk(file_system: FileSystem, folders: Mapping[tuple[str, int], str]) -> Sizes:
    return {key: _size_on_disk(file_system, folder) for key, folder in folders.items()}


def _size_on_disk(file_system: FileSystem, folder: str) -> int:
    """Returns the size of a log; 0 if nothing was written yet, or if the folder is deleted meanwhile."""
    try:
        names = [name for name in file_system.list_dir(folder) if name.endswith(LOG_SUFFIX)]
        return sum(file_system.size(f"{folder}/{name}") for name in names)
    except FileNotFoundError:
        return 0


def _volume(folder: str) -> tuple[int, int]:
    """Returns the size and the free space of the folder's volume in bytes; -1 for both if the data is in memory."""
    try:
        volume = os.statvfs(folder)
    except OSError:
        return UNKNOWN_BYTES, UNKNOWN_BYTES
    return volume.f_blocks * volume.f_frsize, volume.f_bavail * volume.f_frsize


def error_response(request: DescribeLogDirsRequest, error: KafkaError, version: int) -> DescribeLogDirsResponse:
    return DescribeLogDirsResponse(error_code=error.error)
