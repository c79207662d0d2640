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
from kcoord.server.mutation_quota import MutationQuota, operation_context
from kcoord.server.replies import map_reply
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import CreateTopicsRequest, CreateTopicsResponse

CREATE_TOPICS_VERSION: Final = 7
"""The version of CreateTopics that a broker sends to the controller."""

_FINE: Final = (Errors.NONE, Errors.TOPIC_ALREADY_EXISTS)
"""Codes that are no failure: another request may have created the topic meanwhile."""


def auto_create(broker: Broker, context: RequestContext, names: list[str]) -> asyncio.Future[dict[str, int]]:
    """Creates topics that a client names. The future has the error codes of the topics that could not be created.

    A topic that the client's quota forbids is unknown, as in Kafka: clients ask for it again.
    """
    quota = MutationQuota.of(broker, context, strict_since=0)
    return _create(broker, operation_context(context, quota), names)


def _create(broker: Broker, operation: OperationContext, names: list[str]) -> asyncio.Future[dict[str, int]]:
    topic_ids = broker.uuids.take_topic_ids(len(names))

    def create(
        machine: MetadataMachine, context: OperationContext, request: CreateTopicsRequest
    ) -> CoordinatorResult[CreateTopicsResponse]:
        return machine.create_topics(context, request, topic_ids)

    operation.api_version = CREATE_TOPICS_VERSION
    return map_reply(broker.metadata.call(create, auto_create_request(broker.config, names), operation), _failures)


def ensure_internal_topic(broker: Broker, context: RequestContext, name: str) -> asyncio.Future[None]:
    """Creates the topic of a coordinator; the future ends when the topic exists.

    Raises COORDINATOR_NOT_AVAILABLE, or ends with it, if the topic cannot be created now.
    """

    def check(failures: dict[str, int]) -> None:
        if failures:
            raise KafkaError(Errors.COORDINATOR_NOT_AVAILABLE, f"{name} cannot be created.")

    operation = context.operation_context()
    # The broker needs the topic, so its partitions count against no quota.
    operation.principal = ""
    try:
        created = _create(broker, operation, [name])
    except KafkaError as error:
        raise _unavailable(error) from None
    return map_reply(created, check, _refuse)


def _refuse(error: KafkaError) -> None:
    raise _unavailable(error)


def _unavailable(error: KafkaError) -> KafkaError:
    return KafkaError(Errors.COORDINATOR_NOT_AVAILABLE, error.message)


def _failures(outcome: CreateTopicsResponse) -> dict[str, int]:
    return {
        topic.name: Errors.UNKNOWN_TOPIC_OR_PARTITION
        if topic.error_code == Errors.THROTTLING_QUOTA_EXCEEDED
        else topic.error_code
        for topic in outcome.topics
        if topic.error_code not in _FINE
    }
