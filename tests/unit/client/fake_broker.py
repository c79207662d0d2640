# SPDX-License-Identifier: Apache-2.0
"""A broker with scripted responses, in the test's own event loop."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Mapping
from typing import Self

from kcoord_protocol.api_keys import ApiKey, request_class
from kcoord_protocol.errors import Errors, FramingError
from kcoord_protocol.framing import FrameReader, decode_request_header, encode_response
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    ApiVersionsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    MetadataRequest,
    MetadataResponse,
)
from tests.unit.client.virtual_loop import now_ms

Answer = Message | bytes | None
Handler = Callable[[Message, int], Answer | Awaitable[Answer]]

NODE_ID = 1


class FakeBroker:
    """A broker whose `handlers` return the responses, by API.

    A response is a message, raw bytes, or None for no response. `requests` has all requests received, and `arrivals`
    their times. `peers` are the other brokers of the cluster.
    """

    def __init__(self, handlers: Mapping[ApiKey, Handler] | None = None, **versions: tuple[int, int]) -> None:
        self.node_id = NODE_ID
        self.handlers: dict[ApiKey, Handler] = {
            ApiKey.API_VERSIONS: self._api_versions,
            ApiKey.METADATA: self._metadata,
            ApiKey.FIND_COORDINATOR: self._find_coordinator,
            **(handlers or {}),
        }
        self.versions = {ApiKey[name.upper()]: allowed for name, allowed in versions.items()}
        self.topics: list[MetadataResponse.MetadataResponseTopic] = []
        self.features: dict[str, int] = {}
        self.peers: list[FakeBroker] = []
        self.requests: list[tuple[ApiKey, int, Message]] = []
        self.arrivals: list[tuple[ApiKey, float]] = []
        self.correlation_ids: list[int] = []
        self.connections: list[asyncio.StreamWriter] = []
        self.tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._failure: AssertionError | None = None
        self.port = 0
        self.tls: ssl.SSLContext | None = None
        """Set before `open` for a broker with TLS."""

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def open(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port, ssl=self.tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.hang_up()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        if self._failure is not None:
            raise self._failure

    def hang_up(self) -> None:
        for writer in self.connections:
            writer.transport.abort()
        self.connections.clear()

    def requests_of(self, key: ApiKey) -> list[Message]:
        return [request for request_key, _, request in self.requests if request_key is key]

    def versions_of(self, key: ApiKey) -> list[int]:
        return [version for request_key, version, _ in self.requests if request_key is key]

    def arrivals_of(self, key: ApiKey) -> list[float]:
        """Returns when the requests of an API arrived, in milliseconds of virtual time."""
        return [time_ms for request_key, time_ms in self.arrivals if request_key is key]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.tasks.add(task)
        self.connections.append(writer)
        frames = FrameReader(1 << 20)
        try:
            while data := await reader.read(65536):
                for frame in frames.feed(data):
                    await self._answer(frame, writer)
        except (ConnectionError, FramingError, asyncio.CancelledError):
            pass
        except AssertionError as error:
            self._failure = self._failure or error
        finally:
            writer.close()
            self.tasks.discard(task)

    async def _answer(self, frame: bytes, writer: asyncio.StreamWriter) -> None:
        header, position = decode_request_header(frame)
        key, version = ApiKey(header.request_api_key), header.request_api_version
        request = request_class(key).decode(frame[position:], version)
        self.requests.append((key, version, request))
        self.arrivals.append((key, now_ms()))
        self.correlation_ids.append(header.correlation_id)
        outcome = self.handlers[key](request, version)
        answer = await outcome if isinstance(outcome, Awaitable) else outcome
        if isinstance(answer, bytes):
            writer.write(answer)
        elif answer is not None:
            if isinstance(answer, ApiVersionsResponse) and answer.error_code == Errors.UNSUPPORTED_VERSION:
                writer.write(encode_response(header.correlation_id, key, 0, answer.encode(0)))
            else:
                writer.write(encode_response(header.correlation_id, key, version, answer.encode(version)))

    def api_versions(self) -> list[ApiVersionsResponse.ApiVersion]:
        ranges = {key: _all_versions(key) for key in self.handlers} | self.versions
        return [
            ApiVersionsResponse.ApiVersion(api_key=key, min_version=lowest, max_version=highest)
            for key, (lowest, highest) in ranges.items()
        ]

    def _api_versions(self, request: Message, version: int) -> Answer:
        feature = ApiVersionsResponse.FinalizedFeatureKey
        return ApiVersionsResponse(
            api_keys=self.api_versions(),
            finalized_features=[
                feature(name=name, max_version_level=level, min_version_level=level)
                for name, level in self.features.items()
            ],
        )

    def _metadata(self, request: Message, version: int) -> Answer:
        assert isinstance(request, MetadataRequest)
        return MetadataResponse(
            brokers=[
                MetadataResponse.MetadataResponseBroker(node_id=broker.node_id, host="127.0.0.1", port=broker.port)
                for broker in (self, *self.peers)
            ],
            controller_id=self.node_id,
            cluster_id="fake",
            topics=self.described(request),
        )

    def described(self, request: MetadataRequest) -> list[MetadataResponse.MetadataResponseTopic]:
        """Returns the topics that the request names, by name or by id. Unknown topics have an error."""
        if request.topics is None:
            return self.topics
        unknown = MetadataResponse.MetadataResponseTopic
        described = []
        for requested in request.topics:
            topics = [
                topic
                for topic in self.topics
                if requested.name == topic.name or (requested.name is None and requested.topic_id == topic.topic_id)
            ]
            described += topics or [
                unknown(name=requested.name, error_code=Errors.UNKNOWN_TOPIC_OR_PARTITION)
                if requested.name is not None
                else unknown(name=None, topic_id=requested.topic_id, error_code=Errors.UNKNOWN_TOPIC_ID)
            ]
        return described

    def _find_coordinator(self, request: Message, version: int) -> Answer:
        assert isinstance(request, FindCoordinatorRequest)
        if version < 4:
            return FindCoordinatorResponse(node_id=self.node_id, host="127.0.0.1", port=self.port)
        return FindCoordinatorResponse(
            coordinators=[
                FindCoordinatorResponse.Coordinator(key=key, node_id=self.node_id, host="127.0.0.1", port=self.port)
                for key in request.coordinator_keys
            ]
        )

    def add_topic(self, name: str, topic_id: bytes, creation_times_ms: list[int]) -> None:
        """Adds or replaces a topic, with one partition per creation time."""
        self.topics = [topic for topic in self.topics if topic.name != name]
        self.topics.append(
            MetadataResponse.MetadataResponseTopic(
                name=name,
                topic_id=topic_id,
                partitions=[
                    MetadataResponse.MetadataResponsePartition(
                        partition_index=index, leader_id=self.node_id, leader_epoch=0, creation_time_ms=time_ms
                    )
                    for index, time_ms in enumerate(creation_times_ms)
                ],
            )
        )


def _all_versions(key: ApiKey) -> tuple[int, int]:
    versions = request_class(key).valid_versions
    return versions.start, versions.stop - 1
