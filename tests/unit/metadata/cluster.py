# SPDX-License-Identifier: Apache-2.0
"""A metadata machine with a log and a clock that tests control. It replays records as the runtime does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from kcoord.config import BrokerConfig
from kcoord.metadata.image import MetadataImage
from kcoord.metadata.machine import MetadataMachine
from kcoord.metadata.records import BrokerRegistration
from kcoord.metadata.topics import auto_create_request
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext
from kcoord.runtime.serde import MetadataSerde
from kcoord_protocol.messages import CreateTopicsRequest, CreateTopicsResponse
from kcoord_protocol.uuid import uuid_to_string

T = TypeVar("T")

NODE_ID = 1
DIRECTORY_ID = bytes(range(16))

Topic = CreateTopicsRequest.CreatableTopic
Assignment = CreateTopicsRequest.CreatableReplicaAssignment


class Cluster:
    def __init__(self, properties: Mapping[str, str] | None = None) -> None:
        self.config = BrokerConfig.from_properties(properties or {})
        self.machine = MetadataMachine(self.config)
        self.log: list[CoordinatorRecord] = []
        self.now_ms = 1000
        self._ids = 0
        self.register(registration())

    @property
    def image(self) -> MetadataImage:
        return self.machine.image

    def context(self, api_version: int = 0) -> OperationContext:
        return OperationContext(self.now_ms, api_version, candidate_id=uuid_to_string(self.new_id()))

    def new_id(self) -> bytes:
        self._ids += 1
        return self._ids.to_bytes(16, "big")

    def result(
        self, operation: Callable[[MetadataMachine, OperationContext], CoordinatorResult[T]], api_version: int = 0
    ) -> CoordinatorResult[T]:
        """Runs an operation. Its records are encoded, decoded, and added to the log and the image."""
        result = operation(self.machine, self.context(api_version))
        serde = MetadataSerde()
        for record in result.records:
            key, value = serde.serialize(record)
            stored = serde.deserialize(key, value)
            assert stored is not None
            assert stored.value == record.value
            self.log.append(stored)
            self.machine.replay(stored)
        return result

    def run(
        self, operation: Callable[[MetadataMachine, OperationContext], CoordinatorResult[T]], api_version: int = 0
    ) -> T:
        return self.result(operation, api_version).response

    def register(self, *registrations: BrokerRegistration) -> list[CoordinatorRecord]:
        """Registers brokers as at a start; returns the records."""
        return self.result(lambda machine, context: machine.register_brokers(context, registrations)).records

    def ensure_topic(self, name: str) -> CreateTopicsResponse.CreatableTopicResult:
        """Creates an internal topic with the request that a broker makes for it."""
        return self.create(*auto_create_request(self.config, [name]).topics)[0]

    def create(self, *topics: Topic, validate_only: bool = False) -> list[CreateTopicsResponse.CreatableTopicResult]:
        request = CreateTopicsRequest(topics=list(topics), validate_only=validate_only)
        ids = [self.new_id() for _ in topics]
        return self.run(lambda machine, context: machine.create_topics(context, request, ids)).topics

    def create_error(self, topic: Topic) -> int:
        """Returns the error code of creating a topic; checks that an error does not change the image."""
        before = self.image
        (answer,) = self.create(topic)
        assert answer.error_code == 0 or self.image is before
        assert (answer.error_message is None) == (answer.error_code == 0)
        return answer.error_code


def topic(
    name: str,
    partitions: int = 1,
    replication_factor: int = 1,
    assignments: Sequence[tuple[int, list[int]]] = (),
    **configs: str | None,
) -> Topic:
    """Returns a topic to create; `retention_ms="5"` sets the config retention.ms."""
    return Topic(
        name=name,
        num_partitions=partitions,
        replication_factor=replication_factor,
        assignments=[Assignment(partition_index=index, broker_ids=brokers) for index, brokers in assignments],
        configs=[
            CreateTopicsRequest.CreatableTopicConfig(name=key.replace("_", "."), value=value)
            for key, value in configs.items()
        ],
    )


def manual(name: str, *assignments: tuple[int, list[int]]) -> Topic:
    return topic(name, -1, -1, assignments)


def registration(broker_id: int = NODE_ID, host: str = "127.0.0.1", rack: str | None = None) -> BrokerRegistration:
    return BrokerRegistration(broker_id, bytes(15) + b"\7", [("PLAINTEXT", host, 9092, 0)], rack, [DIRECTORY_ID])
