# SPDX-License-Identifier: Apache-2.0
"""Topics that a broker makes because a client needs them: those of the coordinators, and what auto.create.topics.enable
allows.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kcoord.metadata.machine import MetadataMachine
from kcoord.metadata.topics import auto_create_request
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import map_reply
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import CreateTopicsRequest, CreateTopicsResponse

CREATE_TOPICS_VERSION: Final = 7
"""In which version a broker asks the controller for topics that its clients need."""

_FINE: Final = (Errors.NONE, Errors.TOPIC_ALREADY_EXISTS)
"""A topic that somebody else created in the meantime is no failure."""


def auto_create(broker: Broker, context: RequestContext, names: list[str]) -> asyncio.Future[dict[str, int]]:
    """The error codes of those that could not be created."""
    topic_ids = broker.uuids.take_topic_ids(len(names))

    def create(
        machine: MetadataMachine, context: OperationContext, request: CreateTopicsRequest
    ) -> CoordinatorResult[CreateTopicsResponse]:
        return machine.create_topics(context, request, topic_ids)

    operation_context = context.operation_context()
    operation_context.api_version = CREATE_TOPICS_VERSION
    request = auto_create_request(broker.config, names)
    return map_reply(broker.metadata.call(create, request, operation_context), _failures)


def ensure_internal_topic(broker: Broker, context: RequestContext, name: str) -> asyncio.Future[None]:
    """Ends when a coordinator's topic is there; COORDINATOR_NOT_AVAILABLE where it cannot be made now."""

    def check(failures: dict[str, int]) -> None:
        if failures:
            raise KafkaError(Errors.COORDINATOR_NOT_AVAILABLE, f"{name} cannot be created.")

    try:
        created = auto_create(broker, context, [name])
    except KafkaError as error:
        raise _unavailable(error) from None
    return map_reply(created, check, _refuse)


def _refuse(error: KafkaError) -> None:
    raise _unavailable(error)


def _unavailable(error: KafkaError) -> KafkaError:
    return KafkaError(Errors.COORDINATOR_NOT_AVAILABLE, error.message)


def _failures(outcome: CreateTopicsResponse) -> dict[str, int]:
    return {topic.name: topic.error_code for topic in outcome.topics if topic.error_code not in _FINE}
