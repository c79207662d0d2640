# SPDX-License-Identifier: Apache-2.0
"""What changes the metadata log, as data: run by the controller's own machine, or sent to the controller by another
worker, in the requests that Kafka's brokers send.

An operation is called with the machine where the log is; elsewhere `api_key`, `version`, `request` and `result_of` say
how it travels.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol, TypeVar, cast

from kcoord.metadata.machine import ProducerIdBlock
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    AllocateProducerIdsRequest,
    AllocateProducerIdsResponse,
    AlterConfigsRequest,
    AlterConfigsResponse,
    AlterPartitionReassignmentsRequest,
    AlterPartitionReassignmentsResponse,
    BrokerHeartbeatRequest,
    BrokerHeartbeatResponse,
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    ElectLeadersRequest,
    ElectLeadersResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
    Message,
    UnregisterBrokerRequest,
    UnregisterBrokerResponse,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)

if TYPE_CHECKING:
    from kcoord.metadata.image import MetadataImage
    from kcoord.metadata.machine import MetadataMachine
    from kcoord.runtime.result import CoordinatorResult, OperationContext

T = TypeVar("T")

NEWEST_CREATE_TOPICS: Final = 7


class MetadataOperation(Protocol[T]):
    """See the module's text."""

    def __call__(self, machine: MetadataMachine, context: OperationContext) -> CoordinatorResult[T]: ...

    @property
    def api_key(self) -> ApiKey: ...

    @property
    def request(self) -> Message: ...

    def version(self, context: OperationContext) -> int:
        """In which version the request is sent."""

    def result_of(self, response: Message) -> T:
        """What the controller's answer means here."""


class MetadataService(Protocol):
    """The metadata as a process has it: the log itself, or what the controller's worker sends of it."""

    image_observers: list[Callable[[MetadataImage], None]]
    """Called with each new image, when it is durable."""

    def run(self, operation: MetadataOperation[T], context: OperationContext) -> asyncio.Future[T]:
        """Has the controller run an operation. The future ends when the change is durable and every worker has
        published it.
        """

    @property
    def end_offset(self) -> int:
        """The end of the metadata log, as far as this process has read it."""

    @property
    def image(self) -> MetadataImage: ...

    def close(self) -> None: ...


class _AsAsked:
    """The request of a client, in the client's version."""

    def version(self, context: OperationContext) -> int:
        return context.api_version


@dataclass(slots=True, frozen=True)
class CreateTopics(_AsAsked):
    """`topic_ids` are fresh random ids, at least as many as the request has topics."""

    request: CreateTopicsRequest
    topic_ids: Sequence[bytes]
    api_key: ApiKey = ApiKey.CREATE_TOPICS

    def __call__(self, machine: MetadataMachine, context: OperationContext) -> CoordinatorResult[CreateTopicsResponse]:
        return machine.create_topics(context, self.request, self.topic_ids)

    def result_of(self, response: Message) -> CreateTopicsResponse:
        return cast("CreateTopicsResponse", response)


class AutoCreateTopics(CreateTopics):
    """Topics that a broker makes because a client needs them: its own request, in the newest version."""

    __slots__ = ()

    def version(self, context: OperationContext) -> int:
        return NEWEST_CREATE_TOPICS


@dataclass(slots=True, frozen=True)
class CreatePartitions(_AsAsked):
    request: CreatePartitionsRequest
    api_key: ApiKey = ApiKey.CREATE_PARTITIONS

    def __call__(
        self, machine: MetadataMachine, context: OperationContext
    ) -> CoordinatorResult[CreatePartitionsResponse]:
        return machine.create_partitions(context, self.request)

    def result_of(self, response: Message) -> CreatePartitionsResponse:
        return cast("CreatePartitionsResponse", response)


@dataclass(slots=True, frozen=True)
class DeleteTopics(_AsAsked):
    request: DeleteTopicsRequest
    api_key: ApiKey = ApiKey.DELETE_TOPICS

    def __call__(self, machine: MetadataMachine, context: OperationContext) -> CoordinatorResult[DeleteTopicsResponse]:
        return machine.delete_topics(context, self.request)

    def result_of(self, response: Message) -> DeleteTopicsResponse:
        return cast("DeleteTopicsResponse", response)


@dataclass(slots=True, frozen=True)
class AlterConfigs(_AsAsked):
    request: AlterConfigsRequest
    api_key: ApiKey = ApiKey.ALTER_CONFIGS

    def __call__(self, machine: MetadataMachine, context: OperationContext) -> CoordinatorResult[AlterConfigsResponse]:
        return machine.alter_configs(context, self.request)

    def result_of(self, response: Message) -> AlterConfigsResponse:
        return cast("AlterConfigsResponse", response)


@dataclass(slots=True, frozen=True)
class IncrementalAlterConfigs(_AsAsked):
    request: IncrementalAlterConfigsRequest
    api_key: ApiKey = ApiKey.INCREMENTAL_ALTER_CONFIGS

    def __call__(
        self, machine: MetadataMachine, context: OperationContext
    ) -> CoordinatorResult[IncrementalAlterConfigsResponse]:
        return machine.incremental_alter_configs(context, self.request)

    def result_of(self, response: Message) -> IncrementalAlterConfigsResponse:
        return cast("IncrementalAlterConfigsResponse", response)


@dataclass(slots=True, frozen=True)
class AlterPartitionReassignments(_AsAsked):
    request: AlterPartitionReassignmentsRequest
    api_key: ApiKey = ApiKey.ALTER_PARTITION_REASSIGNMENTS

    def __call__(
        self, machine: MetadataMachine, context: OperationContext
    ) -> CoordinatorResult[AlterPartitionReassignmentsResponse]:
        return machine.alter_partition_reassignments(context, self.request)

    def result_of(self, response: Message) -> AlterPartitionReassignmentsResponse:
        return cast("AlterPartitionReassignmentsResponse", response)


@dataclass(slots=True, frozen=True)
class ElectLeaders(_AsAsked):
    request: ElectLeadersRequest
    api_key: ApiKey = ApiKey.ELECT_LEADERS

    def __call__(self, machine: MetadataMachine, context: OperationContext) -> CoordinatorResult[ElectLeadersResponse]:
        return machine.elect_leaders(context, self.request)

    def result_of(self, response: Message) -> ElectLeadersResponse:
        return cast("ElectLeadersResponse", response)


@dataclass(slots=True, frozen=True)
class UpdateFeatures(_AsAsked):
    request: UpdateFeaturesRequest
    api_key: ApiKey = ApiKey.UPDATE_FEATURES

    def __call__(
        self, machine: MetadataMachine, context: OperationContext
    ) -> CoordinatorResult[UpdateFeaturesResponse]:
        return machine.update_features(context, self.request)

    def result_of(self, response: Message) -> UpdateFeaturesResponse:
        return cast("UpdateFeaturesResponse", response)


@dataclass(slots=True, frozen=True)
class UnregisterBroker(_AsAsked):
    request: UnregisterBrokerRequest
    api_key: ApiKey = ApiKey.UNREGISTER_BROKER

    def __call__(self, machine: MetadataMachine, context: OperationContext) -> CoordinatorResult[None]:
        return machine.unregister_broker(context, self.request.broker_id)

    def result_of(self, response: Message) -> None:
        answer = cast("UnregisterBrokerResponse", response)
        if answer.error_code:
            raise KafkaError(Errors(answer.error_code), answer.error_message)


@dataclass(slots=True, frozen=True)
class FenceBroker:
    """Takes a broker out of service, or back (KIP-631); the answer is whether it is fenced then."""

    broker_id: int
    fenced: bool
    api_key: ApiKey = ApiKey.BROKER_HEARTBEAT

    def __call__(self, machine: MetadataMachine, context: OperationContext) -> CoordinatorResult[bool]:
        return machine.fence_broker(context, self.broker_id, self.fenced)

    @property
    def request(self) -> BrokerHeartbeatRequest:
        return BrokerHeartbeatRequest(broker_id=self.broker_id, want_fence=self.fenced)

    def version(self, context: OperationContext) -> int:
        return 0

    def result_of(self, response: Message) -> bool:
        answer = cast("BrokerHeartbeatResponse", response)
        if answer.error_code:
            raise KafkaError(Errors(answer.error_code))
        return answer.is_fenced


@dataclass(slots=True, frozen=True)
class AllocateProducerIds:
    """A block of producer ids for a broker (KIP-730)."""

    broker_id: int
    api_key: ApiKey = ApiKey.ALLOCATE_PRODUCER_IDS

    def __call__(self, machine: MetadataMachine, context: OperationContext) -> CoordinatorResult[ProducerIdBlock]:
        return machine.allocate_producer_ids(context, self.broker_id)

    @property
    def request(self) -> AllocateProducerIdsRequest:
        return AllocateProducerIdsRequest(broker_id=self.broker_id)

    def version(self, context: OperationContext) -> int:
        return 0

    def result_of(self, response: Message) -> ProducerIdBlock:
        answer = cast("AllocateProducerIdsResponse", response)
        if answer.error_code:
            raise KafkaError(Errors(answer.error_code), "The controller has given no producer ids.")
        return ProducerIdBlock(answer.producer_id_start, answer.producer_id_len)
