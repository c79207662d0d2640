# SPDX-License-Identifier: Apache-2.0
"""Hypothesis checks that the cache of metadata answers changes no response.

Two connections to one broker, one with the cache and one without, send the same bytes in the same order. Topics,
configs and brokers change in between. Each change is followed by requests that were also made before it.
"""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kcoord.metadata.image import BROKER_RESOURCE, TOPIC_RESOURCE
from kcoord.metadata.records import BrokerRegistration
from kcoord.server.api.api_table import build_api_table
from kcoord.server.fast.metadata import MetadataResponses
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.net.request_path import RequestPath
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import encode_request
from kcoord_protocol.messages import (
    CreatePartitionsRequest,
    DeleteTopicsRequest,
    DescribeTopicPartitionsRequest,
    IncrementalAlterConfigsRequest,
    Message,
    MetadataRequest,
    MetadataResponse,
)
from tests.unit.metadata.cluster import Cluster, Topic
from tests.unit.metadata.serving import broker_of

NAMES = st.sampled_from(["a", "b", "c", "__consumer_offsets", "wrong name"])


class Client:
    """A connection, with the cache or without."""

    def __init__(self, broker: object, answers: MetadataResponses | None) -> None:
        self.metadata_responses = answers
        settings = PathSettings(cast("Any", broker), "PLAINTEXT", 100_000, 100_000, False, answers)
        self.path = RequestPath(settings, lambda: None, "192.0.2.7", 4711)

    def ask(self, frame: bytes) -> bytes:
        """Returns the response, empty if it is not available at once."""
        self.path.receive(frame)
        assert self.path.close_reason is None
        return self.path.take_output()


class ClusterLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.cluster = Cluster({"auto.create.topics.enable": "true"})
        self.broker = broker_of(self.cluster)
        self.broker.apis = build_api_table(self.cluster.config)
        self.cached = self.loop.run_until_complete(self._connect(MetadataResponses(max_bytes=6000)))
        self.plain = self.loop.run_until_complete(self._connect(None))
        self.asked: list[tuple[ApiKey, int, bytes]] = []
        self.correlation_id = 0

    async def _connect(self, answers: MetadataResponses | None) -> Client:
        return Client(self.broker, answers)

    def teardown(self) -> None:
        self.loop.close()

    def _ask(self, key: ApiKey, version: int, body: bytes, client_id: str = "c") -> None:
        self.correlation_id += 1
        frame = encode_request(key, version, self.correlation_id, client_id, body)

        async def both() -> None:
            assert self.cached.ask(frame) == self.plain.ask(frame)

        self.loop.run_until_complete(both())

    def _ask_later_too(self, request: Message, version: int) -> None:
        key, body = ApiKey(request.api_key), request.encode(version)
        self._ask(key, version, body)
        self.asked.append((key, version, body))

    def _publish(self) -> None:
        self.broker.image = self.cluster.image

    @rule(
        names=st.none() | st.lists(NAMES, max_size=4),
        version=st.sampled_from([0, 1, 9, 12, 13, 14]),
        operations=st.booleans(),
    )
    def metadata(self, names: list[str] | None, version: int, operations: bool) -> None:
        topics = None if names is None else [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
        request = MetadataRequest(topics=topics or ([] if version == 0 else topics), allow_auto_topic_creation=False)
        if version in range(8, 11):
            request.include_topic_authorized_operations = operations
            request.include_cluster_authorized_operations = operations
        if version < 4:
            request.allow_auto_topic_creation = True
            if all(name in self.cluster.image.topics for name in names or ()):
                self._ask(ApiKey.METADATA, version, request.encode(version))
            # Otherwise the request would create a topic, and its response waits for that. Likewise, if the request
            # were repeated after a topic was deleted.
            return
        self._ask_later_too(request, version)

    @rule(index=st.integers(0, 3), version=st.sampled_from([12, 13, 14]))
    def metadata_by_id(self, index: int, version: int) -> None:
        ids = [*self.cluster.image.topics_by_id, bytes([9]) * 16]
        topics = [MetadataRequest.MetadataRequestTopic(name=None, topic_id=ids[index % len(ids)])]
        self._ask_later_too(MetadataRequest(topics=topics, allow_auto_topic_creation=False), version)

    @rule(names=st.lists(NAMES, max_size=3), limit=st.integers(1, 5), version=st.integers(0, 1))
    def describe(self, names: list[str], limit: int, version: int) -> None:
        topics = [DescribeTopicPartitionsRequest.TopicRequest(name=name) for name in names]
        request = DescribeTopicPartitionsRequest(topics=topics, response_partition_limit=limit)
        self._ask_later_too(request, version)

    @rule(name=NAMES, count=st.integers(1, 5))
    def create(self, name: str, count: int) -> None:
        self.cluster.create(Topic(name=name, num_partitions=count, replication_factor=1))
        self._publish()

    @rule(name=NAMES, count=st.integers(2, 8))
    def grow(self, name: str, count: int) -> None:
        topic = CreatePartitionsRequest.CreatePartitionsTopic(name=name, count=count, assignments=None)
        request = CreatePartitionsRequest(topics=[topic])
        self.cluster.run(lambda machine, context: machine.create_partitions(context, request))
        self._publish()

    @rule(name=NAMES)
    def delete(self, name: str) -> None:
        request = DeleteTopicsRequest(topic_names=[name])
        self.cluster.run(lambda machine, context: machine.delete_topics(context, request), api_version=5)
        self._publish()

    @rule(
        resource=st.sampled_from([(TOPIC_RESOURCE, "a", "retention.ms"), (BROKER_RESOURCE, "", "log.retention.ms")]),
        value=st.sampled_from(["1000", "2000"]),
    )
    def configure(self, resource: tuple[int, str, str], value: str) -> None:
        type_, name, key = resource
        config = IncrementalAlterConfigsRequest.AlterableConfig(name=key, value=value)
        change = IncrementalAlterConfigsRequest.AlterConfigsResource(
            resource_type=type_, resource_name=name, configs=[config]
        )
        request = IncrementalAlterConfigsRequest(resources=[change])
        self.cluster.run(lambda machine, context: machine.incremental_alter_configs(context, request))
        self._publish()

    @rule(host=st.sampled_from(["one", "two"]))
    def register(self, host: str) -> None:
        registration = BrokerRegistration(1, bytes(16), [("PLAINTEXT", host, 4711, 0)], None, [bytes(16)])
        self.cluster.register(registration)
        self._publish()

    @invariant()
    def everything_asked_so_far_is_answered_alike(self) -> None:
        for key, version, body in self.asked[-8:]:
            self._ask(key, version, body)
            self._ask(key, version, body, client_id="other")
        assert (answers := self.cached.metadata_responses) is not None
        assert answers.size_bytes <= 6000


ClusterLife.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestClusterLife = ClusterLife.TestCase


def frame_of(number: int) -> bytes:
    body = MetadataRequest(topics=[]).encode(13)
    return encode_request(ApiKey.METADATA, 13, number, f"client-{number}", body)[4:]


def answer_of(number: int, size: int = 100) -> bytes:
    return bytes(4) + number.to_bytes(4, "big") + bytes([number % 256]) * size


REGULAR = MetadataResponse(brokers=[MetadataResponse.MetadataResponseBroker()])


def test_an_answer_is_repeated_with_the_new_correlation_id_until_the_image_changes() -> None:
    answers, image = MetadataResponses(), cast("Any", SimpleNamespace())
    frame = frame_of(1)
    assert answers.respond(frame, image) is None
    answers.remember(frame, image, REGULAR, answer_of(1))
    again = frame[:4] + (77).to_bytes(4, "big") + frame[8:]
    assert answers.respond(again, image) == bytes(4) + (77).to_bytes(4, "big") + b"\x01" * 100
    other_version = frame[:2] + b"\x00\x0c" + frame[4:]
    assert answers.respond(other_version, image) is None
    assert answers.respond(again, cast("Any", SimpleNamespace())) is None
    assert answers.respond(again, image) is None
    assert answers.size_bytes == 0


def test_the_oldest_answers_make_room_and_giants_are_not_kept() -> None:
    answers, image = MetadataResponses(max_bytes=4000), cast("Any", SimpleNamespace())
    for number in range(100):
        assert answers.respond(frame_of(number), image) is None
        answers.remember(frame_of(number), image, REGULAR, answer_of(number))
        assert answers.size_bytes <= 4000
    assert answers.respond(frame_of(99), image) is not None
    assert answers.respond(frame_of(0), image) is None
    before = answers.size_bytes
    answers.remember(frame_of(1), image, REGULAR, answer_of(1, 1001))
    assert answers.size_bytes == before


def test_the_answer_to_a_defect_is_not_kept() -> None:
    answers, image = MetadataResponses(), cast("Any", SimpleNamespace())
    assert answers.respond(frame_of(1), image) is None
    answers.remember(frame_of(1), image, MetadataResponse(error_code=-1), answer_of(1))
    assert answers.respond(frame_of(1), image) is None
