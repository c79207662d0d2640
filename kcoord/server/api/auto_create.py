# SPDX-License-Identifier: Apache-2.0
"""Creates the topics that clients need: internal topics, and topics by auto.create.topics.enable."""

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
"""The version of CreateTopics that a broker sends to the controller."""

_FINE: Final = (Errors.NONE, Errors.TOPIC_ALREADY_EXISTS)
"""Codes that are no failure: another request may have created the topic meanwhile."""


def auto_create(broker: Broker, context: RequestContext, names: list[str]) -> asyncio.Future[dict[str, int]]:
    """Creates topics. The future has the error codes of the topics that could not be created."""
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
    """Creates the topic of a coordinator; the future ends when the topic exists.

    Raises COORDINATOR_NOT_AVAILABLE, or ends with it, if the topic cannot be created now.
    """

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
