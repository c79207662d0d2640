# SPDX-License-Identifier: Apache-2.0
"""DeleteRecords: moves the log start offsets of partitions forward.

Each partition has its own error. The offset -1 stands for the high watermark. The response leaves when the new start
offsets are on disk; Kafka writes them once a minute. If a request names a partition more than once, its last offset
counts, and it gets one result, as in Kafka 4.3.1.
"""

from __future__ import annotations

import asyncio

from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DeleteRecordsRequest, DeleteRecordsResponse

API_KEY = ApiKey.DELETE_RECORDS
VERSIONS = range(0, 3)

INVALID_LOW_WATERMARK = -1


def handle(broker: Broker, context: RequestContext, request: DeleteRecordsRequest) -> Reply[DeleteRecordsResponse]:
    allowed = None
    if context.rights is not None:
        names = [topic.name for topic in request.topics]
        allowed = context.rights.allowed(AclOperation.DELETE, ResourceType.TOPIC, names)
    offsets: dict[str, dict[int, int]] = {}
    for topic in request.topics:
        for partition in topic.partitions:
            offsets.setdefault(topic.name, {})[partition.partition_index] = partition.offset
    response = DeleteRecordsResponse(
        topics=[
            DeleteRecordsResponse.DeleteRecordsTopicResult(
                name=name,
                partitions=[
                    _delete(broker, context, name, index, offset)
                    if allowed is None or name in allowed
                    else _result(index, INVALID_LOW_WATERMARK, Errors.TOPIC_AUTHORIZATION_FAILED)
                    for index, offset in partitions.items()
                ],
            )
            for name, partitions in offsets.items()
        ]
    )
    broker.topics.note_deleted()
    return broker.spawn(_when_kept(broker, response))


async def _when_kept(broker: Broker, response: DeleteRecordsResponse) -> DeleteRecordsResponse:
    """Waits in a thread until the new start offsets are on disk, and returns the response."""
    await asyncio.get_running_loop().run_in_executor(None, broker.topics.keep_deleted)
    return response


def _delete(
    broker: Broker, context: RequestContext, topic: str, index: int, offset: int
) -> DeleteRecordsResponse.DeleteRecordsPartitionResult:
    try:
        low_watermark = broker.topics.delete_records(topic, index, offset, context.now_ms)
    except KafkaError as error:
        return _result(index, INVALID_LOW_WATERMARK, error.error)
    return _result(index, low_watermark, Errors.NONE)


def _result(index: int, low_watermark: int, error: Errors) -> DeleteRecordsResponse.DeleteRecordsPartitionResult:
    return DeleteRecordsResponse.DeleteRecordsPartitionResult(
        partition_index=index, low_watermark=low_watermark, error_code=error
    )


def error_response(request: DeleteRecordsRequest, error: KafkaError, version: int) -> DeleteRecordsResponse:
    return DeleteRecordsResponse(
        topics=[
            DeleteRecordsResponse.DeleteRecordsTopicResult(
                name=topic.name,
                partitions=[
                    _result(partition.partition_index, INVALID_LOW_WATERMARK, error.error)
                    for partition in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )
