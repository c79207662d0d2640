# SPDX-License-Identifier: Apache-2.0
"""The topics of kcoord in the upstream: the logs of the group coordinator, and the log that all instances share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Mapping
from typing import Final, TypeVar

from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.configs import Config
from kcoord.client.admin.model import ConfigResource, ConfigResourceType, NewTopic, TopicDescription
from kcoord.runtime.result import MAX_BATCH_BYTES
from kcoord.runtime.upstream_reader import TOMBSTONES_KEPT_MS
from kcoord.server.errors import StartError
from kcoord.upstream.rights import naming_right
from kcoord_protocol.errors import Errors, KafkaError

OFFSETS_TOPIC: Final = "__kcoord_offsets"
SHARED_TOPIC: Final = "__kcoord_metadata"
OWN_TOPICS: Final = frozenset({OFFSETS_TOPIC, SHARED_TOPIC})
LARGEST_BATCH_BYTES: Final = 65 << 20
"""The target assignment of a group is one batch, of up to 64 MiB."""
_REPLICAS_FOR_TWO_IN_SYNC: Final = 3
"""With fewer replicas, min.insync.replicas=2 would stop all commits while one broker is down."""
_VISIBLE_SECONDS: Final = 15.0
_VISIBLE_CHECK_SECONDS: Final = 0.1
_CONTENTS: Final = {OFFSETS_TOPIC: "committed offsets", SHARED_TOPIC: "creation times and configs of groups"}
LEAST_RETENTION_MS: Final = 3_600_000
"""An instance reads the log from its beginning in this time, and instances that follow it notice every deletion."""
_COMPACTION_LAG_MS: Final = 3_600_000
"""Creation times that came too late are corrected before the log that all instances share is compacted."""

T = TypeVar("T")

_logger = logging.getLogger(__name__)


async def prepare_topic(admin: AdminClient, name: str, partitions: int, segment_bytes: int) -> int:
    """Creates one of kcoord's topics if it does not exist. Raises StartError if it cannot be used.

    Returns how long compaction keeps tombstones, in ms.
    """
    resource = ConfigResource(ConfigResourceType.TOPIC, name)
    try:
        description = await _with_right("Describe", name, _describe(admin, name))
        if description is None:
            is_created = await _with_right("Create", name, _create(admin, name, partitions, segment_bytes))
            description = await _with_right("Describe", name, _until_visible(admin, name))
            if is_created:
                return TOMBSTONES_KEPT_MS
        configs = await _with_right("DescribeConfigs", name, _configs(admin, resource))
    except KafkaError as error:
        raise StartError(f"the topic {name} of the upstream cannot be used: {error}") from None
    values = {key: entry.value or "" for key, entry in configs.items()}
    _check(description, values, partitions)
    return int(values.get("delete.retention.ms") or TOMBSTONES_KEPT_MS)


async def _with_right(operation: str, name: str, step: Awaitable[T]) -> T:
    """Takes a step that needs a right on a topic. An error names the right if it is missing."""
    try:
        return await step
    except KafkaError as error:
        raise naming_right(error, operation, f"topic {name}") from None


async def _configs(admin: AdminClient, resource: ConfigResource) -> Config:
    return (await admin.describe_configs([resource]))[resource]


async def _describe(admin: AdminClient, name: str) -> TopicDescription | None:
    results = await admin.describe_topics([name])
    error = results.error(name)
    is_unknown = error is not None and error.error is Errors.UNKNOWN_TOPIC_OR_PARTITION
    return None if is_unknown else results[name]


async def _create(admin: AdminClient, name: str, partitions: int, segment_bytes: int) -> bool:
    """Creates the topic with the upstream's default number of replicas. Returns False if it already exists."""
    configs = {
        "cleanup.policy": "compact",
        "compression.type": "producer",
        "delete.retention.ms": str(TOMBSTONES_KEPT_MS),
        "max.message.bytes": str(LARGEST_BATCH_BYTES),
        "message.timestamp.type": "LogAppendTime",
        "segment.bytes": str(segment_bytes),
    }
    if name == SHARED_TOPIC:
        configs["min.compaction.lag.ms"] = str(_COMPACTION_LAG_MS)
    topic = NewTopic(name, partitions, configs=configs)
    planned = await admin.create_topics([topic], validate_only=True)
    if planned.error(name) is None:
        replicas = planned[name].replication_factor or 0
        in_sync = (planned[name].configs or {}).get("min.insync.replicas")
        if replicas >= _REPLICAS_FOR_TWO_IN_SYNC and in_sync in (None, "1"):
            configs["min.insync.replicas"] = "2"
    error = (await admin.create_topics([topic])).error(name)
    if error is None:
        _logger.info("Created the topic %s in the upstream with %d partitions", name, partitions)
        return True
    if error.error is not Errors.TOPIC_ALREADY_EXISTS:
        raise error
    return False


async def _until_visible(admin: AdminClient, name: str) -> TopicDescription:
    """Returns the description of the new topic as soon as a broker knows it."""
    deadline = asyncio.get_running_loop().time() + _VISIBLE_SECONDS
    while (description := await _describe(admin, name)) is None:
        if asyncio.get_running_loop().time() > deadline:
            raise KafkaError(
                Errors.UNKNOWN_TOPIC_OR_PARTITION, f"it was created, but not seen for {_VISIBLE_SECONDS:g} s"
            )
        await asyncio.sleep(_VISIBLE_CHECK_SECONDS)
    return description


def _replicas(description: TopicDescription) -> int:
    return min((len(partition.replicas) for partition in description.partitions), default=0)


def _check(description: TopicDescription, configs: Mapping[str, str], partitions: int) -> None:
    name, count = description.name, len(description.partitions)
    if count != partitions:
        reason = (
            f"offsets.topic.num.partitions is {partitions}. The partition of a group depends on this number: set it to "
            f"{count}"
            if name == OFFSETS_TOPIC
            else f"it has to have {partitions}. Delete it, and kcoord creates it again"
        )
        raise StartError(f"the topic {name} of the upstream has {count} partitions, but {reason}")
    policy = configs.get("cleanup.policy")
    if policy != "compact":
        raise StartError(
            f"the topic {name} of the upstream has cleanup.policy={policy}, which deletes {_CONTENTS[name]}. Set it to "
            "compact"
        )
    timestamps = configs.get("message.timestamp.type")
    if name == OFFSETS_TOPIC and timestamps != "LogAppendTime":
        raise StartError(
            f"the topic {name} of the upstream has message.timestamp.type={timestamps}. Set it to LogAppendTime, "
            "because brokers forget producers by timestamps, and then do not reject an earlier owner"
        )
    retention = configs.get("delete.retention.ms")
    if name == OFFSETS_TOPIC and retention and int(retention) < LEAST_RETENTION_MS:
        raise StartError(
            f"the topic {name} of the upstream has delete.retention.ms={retention}. Set it to at least "
            f"{LEAST_RETENTION_MS}, because instances that read more slowly than deletions are forgotten would serve "
            "deleted offsets"
        )
    largest = configs.get("max.message.bytes")
    if name == OFFSETS_TOPIC and largest and int(largest) < MAX_BATCH_BYTES:
        raise StartError(
            f"the topic {name} of the upstream has max.message.bytes={largest}. Set it to at least {MAX_BATCH_BYTES}, "
            "because batches of committed offsets may be that large"
        )
    if name == OFFSETS_TOPIC and largest and int(largest) < LARGEST_BATCH_BYTES:
        _logger.warning(
            "The topic %s has max.message.bytes=%s. If the assignment of a group is larger, the upstream refuses it, "
            "and all groups of its partition are interrupted each time. %d is large enough for every group",
            *(name, largest, LARGEST_BATCH_BYTES),
        )
    replicas = _replicas(description)
    if configs.get("unclean.leader.election.enable") == "true":
        _logger.warning(
            "The topic %s has unclean.leader.election.enable=true: the upstream may lose %s", name, _CONTENTS[name]
        )
    if replicas >= _REPLICAS_FOR_TWO_IN_SYNC and configs.get("min.insync.replicas") == "1":
        _logger.warning(
            "The topic %s has %d replicas and min.insync.replicas=1: a write may be on one broker only", name, replicas
        )
