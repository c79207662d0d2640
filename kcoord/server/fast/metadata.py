# SPDX-License-Identifier: Apache-2.0
"""The fast path of Metadata and DescribeTopicPartitions: equal requests get equal bytes until the image changes.

Such a response depends on the request, the listener, static configs and the metadata image alone; dynamic configs come
with an image. So the frame without the correlation id is the key, and one listener has one cache. All responses are
dropped when `Broker.image` is another object: a topic, config, feature or broker has changed, or the metadata log was
read again.

A connection looks up only versions that it is served (`kcoord.kip1327.revisions`). Only responses that were available
at once are kept, so never the response to a request that creates a topic.

With an authorizer, the response also depends on the ACLs, which change with the image, and on the client's principal
and host. Their hash is part of the key.
"""

from __future__ import annotations

from hashlib import sha256
from typing import TYPE_CHECKING, Final

from kcoord.metadata.image import MetadataImage
from kcoord.server.api.api_table import ApiTable, Client, Exchange
from kcoord.server.fast.fast_path import AFTER_ID, BEFORE_ID, FastPath, Template
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import DescribeTopicPartitionsResponse, MetadataResponse

if TYPE_CHECKING:
    from kcoord.server.broker import Broker

MAX_BYTES: Final = 16 * 1024 * 1024
"""Bound on the requests and responses that one listener keeps; the oldest are dropped first."""

_LARGEST_SHARE: Final = 4
_ENTRY_OVERHEAD_BYTES: Final = 256


class MetadataResponses:
    """The cached responses of one listener. `max_bytes` bounds requests, responses and an estimated overhead."""

    __slots__ = ("_image", "_max_bytes", "_responses", "_size_bytes")

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._responses: dict[bytes, Template] = {}
        self._image: MetadataImage | None = None
        self._max_bytes = max_bytes
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def respond(self, frame: bytes, image: MetadataImage, owner: bytes = b"") -> bytes | None:
        """Returns the framed response if the same request was answered from `image` before, else None.

        `owner` stands for the clients that share responses; it has the same length for all clients.
        """
        if image is not self._image:
            self._responses.clear()
            self._size_bytes = 0
            self._image = image
            return None
        entry = self._responses.get(frame[:BEFORE_ID] + frame[AFTER_ID:] + owner)
        return entry.response_to(frame) if entry is not None else None

    def remember(self, frame: bytes, image: MetadataImage, response: object, data: bytes, owner: bytes = b"") -> None:
        """Keeps `data`, the framed response that `frame` has just got from `image`."""
        size_bytes = _size_bytes(len(frame) + len(owner), len(data))
        if image is not self._image or size_bytes * _LARGEST_SHARE > self._max_bytes or not _is_regular(response):
            return
        responses = self._responses
        while self._size_bytes + size_bytes > self._max_bytes:
            oldest = next(iter(responses))
            template = responses.pop(oldest)
            response_bytes = len(template.head) + len(template.tail) + BEFORE_ID
            self._size_bytes -= _size_bytes(len(oldest) + BEFORE_ID, response_bytes)
        responses[frame[:BEFORE_ID] + frame[AFTER_ID:] + owner] = Template(data)
        self._size_bytes += size_bytes


def _size_bytes(frame_bytes: int, response_bytes: int) -> int:
    return frame_bytes + response_bytes + _ENTRY_OVERHEAD_BYTES


def _is_regular(response: object) -> bool:
    """Returns False for a response that reports a defect: the next request has to run the handler and log again."""
    if isinstance(response, MetadataResponse):
        return bool(response.brokers)
    assert isinstance(response, DescribeTopicPartitionsResponse)
    topics = response.topics
    return bool(topics) and all(topic.error_code != Errors.UNKNOWN_SERVER_ERROR for topic in topics)


class MetadataFastPath(FastPath):
    """Connects one connection with the responses of its listener.

    Connections that are served different versions share the responses, so `respond` checks whether `apis` serves the
    version of the request.
    """

    __slots__ = ("_apis", "_broker", "_client", "_owner", "_responses")

    keys = (ApiKey.METADATA, ApiKey.DESCRIBE_TOPIC_PARTITIONS)

    def __init__(self, responses: MetadataResponses, broker: Broker, apis: ApiTable, client: Client) -> None:
        self._responses = responses
        self._broker = broker
        self._apis = apis
        self._client = client
        self._owner = b""
        if broker.authorizer is not None:
            self._owner = sha256(f"{client.remote_host}\0{client.principal}".encode()).digest()

    def respond(self, frame: bytes, now_ms: int) -> bytes | None:
        if self._apis.bound(frame[:BEFORE_ID]) is None:
            return None
        response = self._responses.respond(frame, self._broker.image, self._owner)
        if response is not None:
            self._client.has_begun = True
        return response

    def learn(self, exchange: Exchange, now_ms: int) -> None:
        """Shares the response with the other connections."""
        assert isinstance(exchange.data, bytes)
        self._responses.remember(exchange.frame, self._broker.image, exchange.response, exchange.data, self._owner)
