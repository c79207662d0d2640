# SPDX-License-Identifier: Apache-2.0
"""The base of stages with a whole broker."""

from __future__ import annotations

import abc
from typing import Any, Final

from kcoord.runtime.result import CoordinatorRecord, Producer
from kcoord.runtime.serde import REASON_HEADER, TRANSACTION_RECORDS, CoordinatorSerde
from kcoord_protocol.messages import (
    ControlRecordTypeSchema,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    DeleteTopicsRequest,
    EndTxnMarker,
    FetchRequest,
    FindCoordinatorRequest,
    IncrementalAlterConfigsRequest,
    InitProducerIdRequest,
    ListOffsetsRequest,
    Message,
    MetadataRequest,
)
from kcoord_protocol.record_batch import BatchHeader, decode_control_key, decode_records, iter_headers
from tests.transcripts.requests import Request
from tests.transcripts.stage import Sent, Stage

_FIND_COORDINATOR_VERSION: Final = 4
_INIT_PRODUCER_ID_VERSION: Final = 4
_CREATE_TOPICS_VERSION: Final = 7
_CREATE_PARTITIONS_VERSION: Final = 3
_DELETE_TOPICS_VERSION: Final = 5
_METADATA_VERSION: Final = 12
_CONFIGS_VERSION: Final = 1
_FETCH_VERSION: Final = 12
_LIST_OFFSETS_VERSION: Final = 7
_GROUP_RESOURCE: Final = 32
_SET, _DELETE = 0, 1
_TIMEOUT_MS: Final = 30_000
_LATEST: Final = -1
_LOGS: Final = (
    ("__consumer_offsets", CoordinatorSerde()),
    ("__transaction_state", CoordinatorSerde(TRANSACTION_RECORDS)),
)


class FrameStage(Stage):
    """A stage with a whole broker: requests change topics and configs, and Fetch reads the records.

    Subclasses send the requests to the broker and decide how time passes.
    """

    async def _open_logs(self) -> None:
        """Creates the topics of the coordinators by FindCoordinator, and notes their end offsets."""
        for kind, key in enumerate(("g", "t")):
            await self._find_coordinator(kind, key)
        # Uses up producer id 0, which in some responses means that there is no producer.
        request = InitProducerIdRequest(transactional_id=None)
        while (await self.request(request, _INIT_PRODUCER_ID_VERSION)).error_code:
            await self.settle()
        self._ends: dict[tuple[str, int], int] = {}
        for topic, _ in _LOGS:
            for partition in range(await self._partition_count(topic)):
                self._ends[topic, partition] = await self._end_offset(topic, partition)

    async def _find_coordinator(self, kind: int, key: str) -> None:
        request = FindCoordinatorRequest(key_type=kind, coordinator_keys=[key])
        while True:
            (answer,) = (await self.request(request, _FIND_COORDINATOR_VERSION)).coordinators
            if answer.error_code == 0:
                return
            await self.settle()

    async def _partition_count(self, topic: str) -> int:
        request = MetadataRequest(topics=[MetadataRequest.MetadataRequestTopic(name=topic)])
        (answer,) = (await self.request(request, _METADATA_VERSION)).topics
        return len(answer.partitions)

    async def _end_offset(self, topic: str, partition: int) -> int:
        latest = ListOffsetsRequest.ListOffsetsPartition(partition_index=partition, timestamp=_LATEST)
        request = ListOffsetsRequest(
            replica_id=-1, topics=[ListOffsetsRequest.ListOffsetsTopic(name=topic, partitions=[latest])]
        )
        (answer,) = (await self.request(request, _LIST_OFFSETS_VERSION)).topics[0].partitions
        assert answer.error_code == 0, answer
        return int(answer.offset)

    @abc.abstractmethod
    async def request(self, message: Message, version: int) -> Any:
        """Sends a request that is not part of the transcript, and returns its response."""

    async def _exchange(self, message: Message, version: int) -> Any:
        sent = Sent(Request(type(message).__name__.removesuffix("Request"), version, "stage", message))
        await self.send(sent)
        for _ in range(100):
            if sent.answer is not None:
                return sent.answer
            await self.settle()
        raise AssertionError(f"no response to {message}")

    # Topics and configs.

    async def set_topic(self, name: str, partitions: int) -> bytes:
        topic = CreateTopicsRequest.CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
        (created,) = (
            await self.request(CreateTopicsRequest(topics=[topic], timeout_ms=_TIMEOUT_MS), _CREATE_TOPICS_VERSION)
        ).topics
        if created.error_code == 0:
            return bytes(created.topic_id)
        more = CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=partitions, assignments=None)
        grown = await self.request(
            CreatePartitionsRequest(topics=[more], timeout_ms=_TIMEOUT_MS), _CREATE_PARTITIONS_VERSION
        )
        assert grown.results[0].error_code == 0, grown
        return self.names.topic_id(name)

    async def delete_topic(self, name: str) -> None:
        deleted = await self.request(
            DeleteTopicsRequest(topic_names=[name], timeout_ms=_TIMEOUT_MS), _DELETE_TOPICS_VERSION
        )
        assert deleted.responses[0].error_code == 0, deleted

    async def set_group_config(self, group: str, configs: dict[str, str | None]) -> None:
        cls = IncrementalAlterConfigsRequest
        altered = [
            cls.AlterableConfig(name=key, value=value, config_operation=_DELETE if value is None else _SET)
            for key, value in configs.items()
        ]
        resource = cls.AlterConfigsResource(resource_type=_GROUP_RESOURCE, resource_name=group, configs=altered)
        response = await self.request(cls(resources=[resource]), _CONFIGS_VERSION)
        assert response.responses[0].error_code == 0, response

    # Records.

    async def take_records(self) -> list[CoordinatorRecord]:
        records: list[CoordinatorRecord] = []
        for topic, serde in _LOGS:
            for partition in [partition for name, partition in self._ends if name == topic]:
                data = await self._fetch(topic, partition)
                for position, header in iter_headers(data):
                    if header.base_offset >= self._ends[topic, partition]:
                        records += _records_of(data, position, header, serde)
                        self._ends[topic, partition] = header.next_offset
        return records

    async def _fetch(self, topic: str, partition: int) -> bytes:
        partition_request = FetchRequest.FetchPartition(
            partition=partition, fetch_offset=self._ends[topic, partition], partition_max_bytes=10_000_000
        )
        request = FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            topics=[FetchRequest.FetchTopic(topic=topic, partitions=[partition_request])],
        )
        (answer,) = (await self.request(request, _FETCH_VERSION)).responses[0].partitions
        assert answer.error_code == 0, answer
        return bytes(answer.records or b"")


def _records_of(data: bytes, position: int, header: BatchHeader, serde: CoordinatorSerde) -> list[CoordinatorRecord]:
    producer = Producer(header.producer_id, header.producer_epoch) if header.is_transactional else None
    records = []
    for entry in decode_records(data, position):
        if header.is_control:
            kind = decode_control_key(entry.key)
            assert kind is not None
            records.append(CoordinatorRecord(ControlRecordTypeSchema(type=kind), EndTxnMarker(), producer=producer))
            continue
        record = serde.deserialize(entry.key, entry.value)
        assert record is not None, serde.describe(entry.key, entry.value)
        record.producer = producer
        record.reason = next((value.decode() for name, value in entry.headers if name == REASON_HEADER and value), "")
        records.append(record)
    return records
