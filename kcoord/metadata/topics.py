# SPDX-License-Identifier: Apache-2.0
"""CreateTopics, CreatePartitions and DeleteTopics: pure functions from image and request to records and response.

Each topic succeeds or fails by itself. `placement` chooses the brokers of new partitions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Final

from kcoord.config import BrokerConfig, ConfigError, check_topic_configs
from kcoord.metadata import records
from kcoord.metadata.collect import duplicates as duplicates_of
from kcoord.metadata.collect import first_of_each
from kcoord.metadata.describe import topic_config_entries
from kcoord.metadata.image import TOPIC_RESOURCE, MetadataImage, TopicImage
from kcoord.metadata.names import check_topic_name, collision_form, may_collide
from kcoord.metadata.placement import Placement, partition_records
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult, OperationContext
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC, GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC
from kcoord_protocol.messages import (
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
)
from kcoord_protocol.uuid import ZERO_UUID

if TYPE_CHECKING:
    from kcoord_protocol.messages import CreatePartitionsRequest

MAX_NEW_PARTITIONS: Final = 10_000
"""The largest number of partitions that one request may create, as in Kafka."""
DEFAULT: Final = -1
MIN_SEGMENT_BYTES: Final = 1_048_576
DUPLICATE_NAME: Final = "Duplicate topic name."
DUPLICATE_ID: Final = "Duplicate topic id."
FIRST_VERSION_WITH_DELETION_DISABLED_ERROR: Final = 3
FIRST_VERSION_WITH_TOPIC_STATES: Final = 6


class TopicOperations:
    """The operations of one request on an image. Collects the records of all topics of the request."""

    def __init__(self, image: MetadataImage, config: BrokerConfig, context: OperationContext) -> None:
        self._image = image
        self._config = config
        self._context = context
        self._records: list[CoordinatorRecord] = []
        # KIP-1327 compares creation times. If the clock goes back, a new partition must not get an older time.
        self._creation_time_ms = max(context.now_ms, image.last_creation_time_ms)
        self._placement = Placement(image.brokers, config.node_id)
        self._colliding: dict[str, str] | None = None
        self._described: dict[tuple[tuple[str, str], ...], list[CreateTopicsResponse.CreatableTopicConfigs]] = {}
        """The configs in the response, by those that a topic sets."""

    def create_topics(
        self, request: CreateTopicsRequest, topic_ids: Sequence[bytes]
    ) -> CoordinatorResult[CreateTopicsResponse]:
        """Creates topics. `topic_ids` are new random ids, at least one per topic of the request."""
        results = []
        duplicates = duplicates_of(topic.name for topic in request.topics)
        self._check_request_size(request)
        for topic, topic_id in zip(first_of_each(request.topics, lambda t: t.name), topic_ids, strict=False):
            try:
                if topic.name in duplicates:
                    raise KafkaError(Errors.INVALID_REQUEST, DUPLICATE_NAME)
                results.append(self._create_topic(topic, topic_id))
            except KafkaError as error:
                results.append(_failed_topic(topic.name, error))
        if request.validate_only:
            self._records.clear()
        return CoordinatorResult(CreateTopicsResponse(topics=results), self._records)

    def _check_request_size(self, request: CreateTopicsRequest) -> None:
        # An invalid negative count must not make up for another topic.
        counts = [len(topic.assignments) or max(self._requested_count(topic), 1) for topic in request.topics]
        _check_new_partitions(sum(counts))

    def _requested_count(self, topic: CreateTopicsRequest.CreatableTopic) -> int:
        return self._default_partitions(topic.name) if topic.num_partitions == DEFAULT else topic.num_partitions

    def _create_topic(
        self, topic: CreateTopicsRequest.CreatableTopic, topic_id: bytes
    ) -> CreateTopicsResponse.CreatableTopicResult:
        self._check_new_name(topic.name)
        configs = self._checked_configs(topic)
        assignment = self._assignment(topic)
        _count_partitions(self._context, len(assignment))
        self._records.append(records.new_topic_record(topic.name, topic_id))
        self._records += records.new_config_records(TOPIC_RESOURCE, topic.name, {}, configs)
        self._add_partitions(topic_id, 0, assignment)
        return CreateTopicsResponse.CreatableTopicResult(
            name=topic.name,
            topic_id=topic_id,
            error_message=None,
            num_partitions=len(assignment),
            replication_factor=len(assignment[0]),
            configs=self._described_configs(configs),
        )

    def _described_configs(self, configs: Mapping[str, str]) -> list[CreateTopicsResponse.CreatableTopicConfigs]:
        """Returns all configs of a topic that sets these. Most topics of a request set the same."""
        key = _key(configs)
        described = self._described.get(key)
        if described is None:
            described = self._described[key] = [
                CreateTopicsResponse.CreatableTopicConfigs(
                    name=entry.name,
                    value=entry.value,
                    read_only=entry.read_only,
                    config_source=entry.source,
                    is_sensitive=entry.is_sensitive,
                )
                for entry in topic_config_entries(self._config, self._image, configs)
            ]
        return described

    def _check_new_name(self, name: str) -> None:
        check_topic_name(name)
        if name == CLUSTER_METADATA_TOPIC:
            raise KafkaError(Errors.INVALID_REQUEST, f"Creation of internal topic {name} is prohibited.")
        if name in self._image.topics:
            raise KafkaError(Errors.TOPIC_ALREADY_EXISTS, f"Topic '{name}' already exists.")
        other = self._collides_with(name)
        if other is not None:
            raise KafkaError(
                Errors.INVALID_TOPIC_EXCEPTION,
                f"Topic '{name}' collides with existing topic: {other}",
            )

    def _collides_with(self, name: str) -> str | None:
        if not may_collide(name):
            return None
        if self._colliding is None:
            self._colliding = {collision_form(topic): topic for topic in self._image.topics if may_collide(topic)}
        return self._colliding.get(collision_form(name))

    def _checked_configs(self, topic: CreateTopicsRequest.CreatableTopic) -> dict[str, str]:
        configs: dict[str, str] = {}
        for config in topic.configs:
            if config.value is None:
                raise KafkaError(Errors.INVALID_CONFIG, f"Null value not supported for topic configs: {config.name}")
            configs[config.name] = config.value
        if _key(configs) in self._described:
            return configs
        try:
            check_topic_configs(self._config, configs)
        except ConfigError as error:
            raise KafkaError(Errors.INVALID_CONFIG, str(error)) from None
        return configs

    def _assignment(self, topic: CreateTopicsRequest.CreatableTopic) -> list[list[int]]:
        """Returns the replicas of each partition: those of the request, or those that the placement chooses."""
        if topic.assignments:
            return self._manual_assignment(topic)
        if topic.replication_factor < DEFAULT or topic.replication_factor == 0:
            raise KafkaError(
                Errors.INVALID_REPLICATION_FACTOR,
                "Replication factor must be larger than 0, or -1 to use the default value.",
            )
        if topic.num_partitions < DEFAULT or topic.num_partitions == 0:
            raise KafkaError(
                Errors.INVALID_PARTITIONS, "Number of partitions was set to an invalid non-positive value."
            )
        count = self._requested_count(topic)
        self._check_internal_partitions(topic.name, count)
        factor = topic.replication_factor
        if factor == DEFAULT:
            factor = self._placement.default_replication_factor(topic.name, self._config)
        self._placement.check_replication_factor(factor)
        return self._placement.spread(topic.name, 0, len(self._image.topics), count, factor)

    def _default_partitions(self, name: str) -> int:
        if name == GROUP_METADATA_TOPIC:
            return self._config.offsets_topic_num_partitions
        if name == TRANSACTION_STATE_TOPIC:
            return self._config.transaction_state_log_num_partitions
        return self._config.num_partitions

    def _check_internal_partitions(self, name: str, count: int) -> None:
        """Raises INVALID_PARTITIONS if a client chooses the number of a coordinator's partitions.

        These partitions are the shards of the coordinator, so the broker's configuration sets their number.
        """
        if name in (GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC) and count != self._default_partitions(name):
            raise KafkaError(
                Errors.INVALID_PARTITIONS,
                f"{name} has {self._default_partitions(name)} partitions by the configuration of the broker.",
            )

    def _manual_assignment(self, topic: CreateTopicsRequest.CreatableTopic) -> list[list[int]]:
        if topic.replication_factor != DEFAULT:
            raise KafkaError(
                Errors.INVALID_REQUEST,
                "A manual partition assignment was specified, but replication factor was not set to -1.",
            )
        if topic.num_partitions != DEFAULT:
            raise KafkaError(
                Errors.INVALID_REQUEST,
                "A manual partition assignment was specified, but numPartitions was not set to -1.",
            )
        assignment: dict[int, list[int]] = {}
        for entry in topic.assignments:
            if entry.partition_index in assignment:
                raise KafkaError(
                    Errors.INVALID_REPLICA_ASSIGNMENT,
                    f"Found multiple manual partition assignments for partition {entry.partition_index}",
                )
            self._placement.check_replicas(entry.broker_ids)
            _check_size(entry.broker_ids, topic.assignments[0].broker_ids)
            assignment[entry.partition_index] = entry.broker_ids
        if sorted(assignment) != list(range(len(assignment))):
            raise KafkaError(
                Errors.INVALID_REPLICA_ASSIGNMENT, "partitions should be a consecutive 0-based integer sequence"
            )
        self._check_internal_partitions(topic.name, len(assignment))
        return [assignment[partition_id] for partition_id in range(len(assignment))]

    def _add_partitions(self, topic_id: bytes, first_id: int, assignment: Sequence[list[int]]) -> None:
        self._records += partition_records(self._image, topic_id, first_id, assignment, self._creation_time_ms)

    def create_partitions(self, request: CreatePartitionsRequest) -> CoordinatorResult[CreatePartitionsResponse]:
        results = []
        duplicates = duplicates_of(topic.name for topic in request.topics)
        topics = self._image.topics
        added = [topic.count - len(topics[topic.name].partitions) for topic in request.topics if topic.name in topics]
        _check_new_partitions(sum([count for count in added if count > 0]))
        for topic in first_of_each(request.topics, lambda t: t.name):
            result = CreatePartitionsResponse.CreatePartitionsTopicResult(name=topic.name)
            try:
                if topic.name in duplicates:
                    raise KafkaError(Errors.INVALID_REQUEST, DUPLICATE_NAME)
                self._create_partitions_of(topic)
            except KafkaError as error:
                result.error_code, result.error_message = error.error, error.message
            results.append(result)
        if request.validate_only:
            self._records.clear()
        return CoordinatorResult(CreatePartitionsResponse(results=results), self._records)

    def _create_partitions_of(self, request: CreatePartitionsRequest.CreatePartitionsTopic) -> None:
        topic = self._image.topics.get(request.name)
        if topic is None:
            raise KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION)
        current = len(topic.partitions)
        if request.count == current:
            raise KafkaError(Errors.INVALID_PARTITIONS, f"Topic already has {current} partition(s).")
        if request.count < current:
            raise KafkaError(
                Errors.INVALID_PARTITIONS,
                f"The topic {request.name} currently has {current} partition(s); {request.count} would not be an "
                "increase.",
            )
        self._check_internal_partitions(request.name, request.count)
        added = request.count - current
        if request.assignments is None:
            factor = len(topic.partitions[0].replicas)
            start = self._positions[topic.name] + current
            assignment = self._placement.spread(topic.name, current, start, added, factor)
        else:
            assignment = [entry.broker_ids for entry in request.assignments]
            if len(assignment) != added:
                raise KafkaError(
                    Errors.INVALID_REPLICA_ASSIGNMENT,
                    f"Attempted to add {added} additional partition(s), but only {len(assignment)} assignment(s) were "
                    "specified.",
                )
            for broker_ids in assignment:
                self._placement.check_replicas(broker_ids)
                _check_size(broker_ids, topic.partitions[0].replicas)
        _count_partitions(self._context, added)
        self._add_partitions(topic.id, current, assignment)

    @cached_property
    def _positions(self) -> Mapping[str, int]:
        """The position of each topic, with which `Placement.spread` began when the topic was created."""
        return {name: position for position, name in enumerate(self._image.topics)}


def delete_topics(
    image: MetadataImage, config: BrokerConfig, context: OperationContext, request: DeleteTopicsRequest
) -> CoordinatorResult[DeleteTopicsResponse]:
    """Deletes topics, by name up to v5, by name or id from v6.

    A topic that the request names twice, by name or by id, is not deleted.
    """
    if not config.delete_topic_enable:
        has_error = context.api_version >= FIRST_VERSION_WITH_DELETION_DISABLED_ERROR
        raise KafkaError(
            Errors.TOPIC_DELETION_DISABLED if has_error else Errors.INVALID_REQUEST,
            "Topics cannot be deleted: delete.topic.enable is false.",
        )
    states = requested_deletions(request, context.api_version)
    duplicates = duplicates_of((state.name, state.topic_id) for state in states)
    twice = _named_twice(image, states)
    result = CoordinatorResult(DeleteTopicsResponse())
    for state in first_of_each(states, lambda state: (state.name, state.topic_id)):
        answer = DeleteTopicsResponse.DeletableTopicResult(name=state.name, topic_id=state.topic_id)
        try:
            if state.name is None and state.topic_id == ZERO_UUID:
                raise KafkaError(Errors.INVALID_REQUEST, "Neither topic name nor id were specified.")
            if (state.name, state.topic_id) in duplicates:
                raise KafkaError(Errors.INVALID_REQUEST, DUPLICATE_NAME if state.name is not None else DUPLICATE_ID)
            topic = _topic_to_delete(image, state)
            answer.name, answer.topic_id = topic.name, topic.id
            if topic.id in twice:
                raise KafkaError(
                    Errors.INVALID_REQUEST, "The provided topic name maps to an ID that was already supplied."
                )
            _count_partitions(context, len(topic.partitions))
            result.records.append(records.new_remove_topic_record(topic.id))
        except KafkaError as error:
            answer.error_code, answer.error_message = error.error, error.message
        result.response.responses.append(answer)
    result.response.responses = first_of_each(result.response.responses, lambda answer: (answer.name, answer.topic_id))
    return result


def _named_twice(image: MetadataImage, states: Sequence[DeleteTopicsRequest.DeleteTopicState]) -> set[bytes]:
    """Returns the ids of topics that the request names both by name and by id."""
    named = {image.topics[state.name].id for state in states if state.name is not None and state.name in image.topics}
    return named & {state.topic_id for state in states if state.name is None}


def requested_deletions(request: DeleteTopicsRequest, version: int) -> list[DeleteTopicsRequest.DeleteTopicState]:
    if version >= FIRST_VERSION_WITH_TOPIC_STATES:
        return request.topics
    return [DeleteTopicsRequest.DeleteTopicState(name=name) for name in request.topic_names]


def _topic_to_delete(image: MetadataImage, state: DeleteTopicsRequest.DeleteTopicState) -> TopicImage:
    if state.name is not None and state.topic_id != ZERO_UUID:
        raise KafkaError(Errors.INVALID_REQUEST, "You may not specify both topic name and topic id.")
    if state.name is not None:
        topic = image.topics.get(state.name)
        if topic is None:
            raise KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION, Errors.UNKNOWN_TOPIC_OR_PARTITION.description)
        return topic
    topic = image.topics_by_id.get(state.topic_id)
    if topic is None:
        raise KafkaError(Errors.UNKNOWN_TOPIC_ID, Errors.UNKNOWN_TOPIC_ID.description)
    return topic


def _key(configs: Mapping[str, str]) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(configs.items()))


def _count_partitions(context: OperationContext, count: int) -> None:
    """Counts created or deleted partitions (KIP-599). Raises THROTTLING_QUOTA_EXCEEDED if the quota forbids them."""
    if context.count_partitions is not None:
        context.count_partitions(count)


def _check_size(broker_ids: Sequence[int], previous: Sequence[int]) -> None:
    if len(broker_ids) != len(previous):
        raise KafkaError(
            Errors.INVALID_REPLICA_ASSIGNMENT,
            f"The manual partition assignment includes a partition with {len(broker_ids)} replica(s), but this is not "
            f"consistent with previous partitions, which have {len(previous)} replica(s).",
        )


def _check_new_partitions(count: int) -> None:
    if count > MAX_NEW_PARTITIONS:
        raise KafkaError(
            Errors.POLICY_VIOLATION,
            f"Excessively large number of partitions per request: {count}, at most {MAX_NEW_PARTITIONS} are allowed.",
        )


def auto_create_request(config: BrokerConfig, names: Sequence[str]) -> CreateTopicsRequest:
    """Returns a request that creates topics with the defaults of the broker, and internal topics with their own."""
    topics = []
    for name in names:
        own = internal_topic_configs(config, name).items()
        topics.append(
            CreateTopicsRequest.CreatableTopic(
                name=name,
                num_partitions=DEFAULT,
                replication_factor=DEFAULT,
                configs=[CreateTopicsRequest.CreatableTopicConfig(name=key, value=value) for key, value in own],
            )
        )
    return CreateTopicsRequest(topics=topics)


def internal_topic_configs(config: BrokerConfig, name: str) -> Mapping[str, str]:
    """Returns the configs of a new internal topic."""
    if name == GROUP_METADATA_TOPIC:
        segment_bytes = config.offsets_topic_segment_bytes
    elif name == TRANSACTION_STATE_TOPIC:
        segment_bytes = config.transaction_state_log_segment_bytes
    else:
        return {}
    # The topic key segment.bytes has a lower limit, which the broker's key for this topic lacks.
    key = "segment.bytes" if segment_bytes >= MIN_SEGMENT_BYTES else "internal.segment.bytes"
    return {"cleanup.policy": "compact", "compression.type": "producer", key: str(segment_bytes)}


def _failed_topic(name: str, error: KafkaError) -> CreateTopicsResponse.CreatableTopicResult:
    return CreateTopicsResponse.CreatableTopicResult(
        name=name, error_code=error.error, error_message=error.message, configs=[]
    )
