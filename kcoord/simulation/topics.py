# SPDX-License-Identifier: Apache-2.0
"""A model of an operator who creates, grows, deletes and recreates topics, and alters configs of groups.

All changes are requests to the broker, which forwards them to the controller. Once the broker has acknowledged a
change, its describe APIs must show the change until the operator makes another one, also after a crash (M-1). If a
response does not come, both outcomes are possible for `_UNSURE_MS`. After that time the operator has to describe the
topic or group before it is sure again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Final

from kcoord.coordinator.group.offsets.expiration import GROUP_RETENTION_KEY
from kcoord.metadata.image import GROUP_RESOURCE
from kcoord.simulation.client import Scene, SimulatedClient
from kcoord.simulation.ledger import CACHED_TOPIC, FLUSHED_TOPIC, RECORD_PARTITIONS
from kcoord.simulation.options import Options
from kcoord.simulation.process import CONTROLLER_ID
from kcoord.simulation.trace import ViolationError
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    DeleteTopicsRequest,
    DeleteTopicsResponse,
    DescribeClusterRequest,
    DescribeClusterResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    DescribeTopicPartitionsRequest,
    DescribeTopicPartitionsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)

FIRST_TOPIC: Final = "topic-0"
LATER_TOPIC: Final = "topic-1"
_MOST_PARTITIONS: Final = 12
_MOST_WAITING: Final = 5
_PATIENCE_MS: Final = 30_000
_UNSURE_MS: Final = 60_000
"""How long a request without a response may still take effect."""
_SET, _DELETE = 0, 1
_GROWN_OR_DELETED: Final = frozenset(
    {Errors.INVALID_PARTITIONS, Errors.INVALID_REPLICA_ASSIGNMENT, Errors.UNKNOWN_TOPIC_OR_PARTITION}
)
"""Errors of CreatePartitions if an earlier request has taken effect. INVALID_REPLICA_ASSIGNMENT: the topic has grown by
less than this request asks for, so the request assigns replicas of too many partitions.
"""
_TRY_AGAIN: Final = frozenset({Errors.NOT_CONTROLLER, Errors.REQUEST_TIMED_OUT})
_SEGMENT_BYTES: Final = 200
"""So small that a power loss often comes between a roll and its sync."""
_ACKNOWLEDGED: Final = "M-1 acknowledged changes of metadata are visible"


def new_topic(name: str, partitions: int, **configs: str) -> CreateTopicsRequest.CreatableTopic:
    """Returns a topic whose partitions the broker under test leads. In names of configs "_" stands for "."."""
    return CreateTopicsRequest.CreatableTopic(
        name=name,
        num_partitions=-1,
        replication_factor=-1,
        assignments=[
            CreateTopicsRequest.CreatableReplicaAssignment(partition_index=number, broker_ids=[1])
            for number in range(partitions)
        ],
        configs=[
            CreateTopicsRequest.CreatableTopicConfig(name=key.replace("_", "."), value=value)
            for key, value in configs.items()
        ],
    )


def first_topics(options: Options) -> list[CreateTopicsRequest.CreatableTopic]:
    """Returns the topics that exist before the first client starts."""
    topics = [new_topic(FIRST_TOPIC, options.partitions)]
    if options.record_producers:
        size = str(_SEGMENT_BYTES)
        topics.append(new_topic(FLUSHED_TOPIC, RECORD_PARTITIONS, flush_messages="1", internal_segment_bytes=size))
        topics.append(new_topic(CACHED_TOPIC, RECORD_PARTITIONS, internal_segment_bytes=size))
    return topics


class TopicAdmin(SimulatedClient):
    """Sends one request at a time and checks M-1. Changes wait while a request is under way, a few at most."""

    def __init__(self, scene: Scene) -> None:
        super().__init__("topic-admin", scene)
        self._trace = scene.trace
        self._partitions = {FIRST_TOPIC: self.options.partitions, LATER_TOPIC: 0}
        """Partitions by topic, as the last response has shown or acknowledged them."""
        self._configs: dict[tuple[str, str], str | None] = {}
        self._unsure_until_ms: dict[str, int] = {}
        self._subject = ""
        self._waiting: deque[Callable[[], None]] = deque()

    def on_timeout(self) -> None:
        self._trace.add("topic-admin-unsure", self._subject)
        self._unsure_until_ms[self._subject] = self.clock.now_ms + _UNSURE_MS
        self._next()

    def _is_sure(self, subject: str) -> bool:
        return subject not in self._unsure_until_ms

    def _described(self, subject: str, asked_ms: int) -> None:
        """Makes the operator sure of a subject if no earlier request could take effect after it was described."""
        if asked_ms >= self._unsure_until_ms.get(subject, 0):
            self._unsure_until_ms.pop(subject, None)

    def _do(self, action: Callable[[], None]) -> None:
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(action)
            self._next()

    def _next(self) -> None:
        if self._waiting and not self.is_waiting:
            self._waiting.popleft()()

    def _take(self, error: int, expected: frozenset[Errors] = frozenset()) -> bool:
        """Returns whether the change was made.

        Raises ViolationError if the error shows that the broker has other topics than it acknowledged. `expected` are
        the errors that are possible while an earlier request may still have taken effect.
        """
        self._trace.add("topic-admin", f"{self._subject} {Errors(error).name}")
        if not error:
            return True
        if error in _TRY_AGAIN:
            # The controller may have made the change, and its response was lost on the way to the broker.
            self._unsure_until_ms[self._subject] = self.clock.now_ms + _UNSURE_MS
        elif self._is_sure(self._subject) or error not in expected:
            raise self.unexpected(error, f"a change of {self._subject}")
        return False

    # Topics.

    def change(self, random: Random) -> None:
        """Changes or describes a topic. The first topic only grows; the later one is also created and deleted."""
        self._do(lambda: self._change(random))

    def _change(self, random: Random) -> None:
        if random.random() < 0.4:
            random.choice((self._look, self._look, self._look_at_cluster))()
        elif not self._partitions[LATER_TOPIC]:
            self._create(random.randint(1, 4), random)
        elif random.random() < 0.3:
            self._delete(random)
        else:
            name = random.choice((FIRST_TOPIC, LATER_TOPIC))
            if self._partitions[name] < _MOST_PARTITIONS:
                self._grow(name, self._partitions[name] + random.randint(1, 3))

    def _ask(
        self, subject: str, api_key: ApiKey, version: int, message: object, on_answer: Callable[[bytes], None]
    ) -> None:
        self._subject = subject

        def answered(body: bytes) -> None:
            on_answer(body)
            self._next()

        self.request(api_key, version, "", message, answered, timeout_ms=_PATIENCE_MS)  # type: ignore[arg-type]

    def _create(self, partitions: int, random: Random) -> None:
        def on_answer(body: bytes) -> None:
            error = CreateTopicsResponse.decode(body, 7).topics[0].error_code
            if self._take(error, frozenset({Errors.TOPIC_ALREADY_EXISTS})):
                self._partitions[LATER_TOPIC] = partitions
                self._look()

        request = CreateTopicsRequest(topics=[new_topic(LATER_TOPIC, partitions)], timeout_ms=_PATIENCE_MS)
        self._ask(LATER_TOPIC, ApiKey.CREATE_TOPICS, 7, request, on_answer)

    def _delete(self, random: Random) -> None:
        comes_again = random.random() < 0.5
        partitions = random.randint(1, 4)

        def on_answer(body: bytes) -> None:
            error = DeleteTopicsResponse.decode(body, 6).responses[0].error_code
            if self._take(error, frozenset({Errors.UNKNOWN_TOPIC_OR_PARTITION})):
                self._partitions[LATER_TOPIC] = 0
                self._waiting.appendleft(lambda: self._create(partitions, random) if comes_again else self._look())

        state = DeleteTopicsRequest.DeleteTopicState(name=LATER_TOPIC)
        request = DeleteTopicsRequest(topics=[state], timeout_ms=_PATIENCE_MS)
        self._ask(LATER_TOPIC, ApiKey.DELETE_TOPICS, 6, request, on_answer)

    def _grow(self, name: str, count: int) -> None:
        def on_answer(body: bytes) -> None:
            error = CreatePartitionsResponse.decode(body, 3).results[0].error_code
            if self._take(error, _GROWN_OR_DELETED):
                self._partitions[name] = count
                self._look()

        assignments = [
            CreatePartitionsRequest.CreatePartitionsAssignment(broker_ids=[1])
            for _ in range(count - self._partitions[name])
        ]
        topic = CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=count, assignments=assignments)
        request = CreatePartitionsRequest(topics=[topic], timeout_ms=_PATIENCE_MS)
        self._ask(name, ApiKey.CREATE_PARTITIONS, 3, request, on_answer)

    def _look(self) -> None:
        """Describes all topics, page by page, and compares them with what was acknowledged (M-1)."""
        self._look_from(None, {}, self.clock.now_ms)

    def _look_from(
        self, cursor: DescribeTopicPartitionsRequest.Cursor | None, seen: dict[str, int], asked_ms: int
    ) -> None:
        def on_answer(body: bytes) -> None:
            response = DescribeTopicPartitionsResponse.decode(body, 0)
            for topic in response.topics:
                name = topic.name or ""
                seen[name] = seen.get(name, 0) + len(topic.partitions)
            after = response.next_cursor
            if after is not None:
                cursor = DescribeTopicPartitionsRequest.Cursor(
                    topic_name=after.topic_name, partition_index=after.partition_index
                )
                self._waiting.appendleft(lambda: self._look_from(cursor, seen, asked_ms))
                return
            for name, count in self._partitions.items():
                if self._is_sure(name) and seen[name] != count:
                    text = f"{name} has {seen[name]} partitions, {count} were acknowledged"
                    raise ViolationError(_ACKNOWLEDGED, text)
                self._partitions[name] = seen[name]
                self._described(name, asked_ms)

        names = [DescribeTopicPartitionsRequest.TopicRequest(name=name) for name in self._partitions]
        request = DescribeTopicPartitionsRequest(
            topics=names, response_partition_limit=self.random.choice((3, 2_000)), cursor=cursor
        )
        self._ask("", ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, request, on_answer)

    def _look_at_cluster(self) -> None:
        def on_answer(body: bytes) -> None:
            response = DescribeClusterResponse.decode(body, 1)
            if response.error_code or response.controller_id != CONTROLLER_ID or len(response.brokers) < 2:
                raise ViolationError(_ACKNOWLEDGED, f"the cluster is {response}")

        self._ask("", ApiKey.DESCRIBE_CLUSTER, 1, DescribeClusterRequest(), on_answer)

    # Configs.

    def configure(self, random: Random, group_ids: list[str]) -> None:
        """Alters one config of a group. Session timeouts only grow, because the model clients count on the broker's."""
        self._do(lambda: self._configure(random, group_ids))

    def _configure(self, random: Random, group_ids: list[str]) -> None:
        options = self.options
        name, values = random.choice(
            (
                ("consumer.heartbeat.interval.ms", ("400", "2000", None)),
                ("consumer.session.timeout.ms", (str(options.session_timeout_ms + 5_000), None)),
                (GROUP_RETENTION_KEY, ("2", None)),
                ("consumer.assignment.interval.ms", ("0", "500", None)),
            )
        )
        group_id, value = random.choice(group_ids), random.choice(values)

        def on_answer(body: bytes) -> None:
            if self._take(IncrementalAlterConfigsResponse.decode(body, 1).responses[0].error_code):
                self._configs[group_id, name] = value
                self._waiting.appendleft(lambda: self._look_at_configs(group_id))

        config = IncrementalAlterConfigsRequest.AlterableConfig(
            name=name, config_operation=_DELETE if value is None else _SET, value=value
        )
        resource = IncrementalAlterConfigsRequest.AlterConfigsResource(
            resource_type=GROUP_RESOURCE, resource_name=group_id, configs=[config]
        )
        request = IncrementalAlterConfigsRequest(resources=[resource])
        self._ask(group_id, ApiKey.INCREMENTAL_ALTER_CONFIGS, 1, request, on_answer)

    def _look_at_configs(self, group_id: str) -> None:
        asked_ms = self.clock.now_ms

        def on_answer(body: bytes) -> None:
            (result,) = DescribeConfigsResponse.decode(body, 4).results
            shown = {config.name: config.value for config in result.configs}
            for (group, name), value in self._configs.items():
                if group != group_id:
                    continue
                if value is not None and self._is_sure(group_id) and shown.get(name) != value:
                    text = f"{group_id} has {name}={shown.get(name)}, {value} was acknowledged"
                    raise ViolationError(_ACKNOWLEDGED, text)
                self._configs[group, name] = shown.get(name)
            self._described(group_id, asked_ms)

        resource = DescribeConfigsRequest.DescribeConfigsResource(
            resource_type=GROUP_RESOURCE, resource_name=group_id, configuration_keys=None
        )
        self._ask(group_id, ApiKey.DESCRIBE_CONFIGS, 4, DescribeConfigsRequest(resources=[resource]), on_answer)
