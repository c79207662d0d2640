# SPDX-License-Identifier: Apache-2.0
"""The interface of fast paths, and the correlation ids of repeated responses.

Theory of operation. A fast path answers a request that is like an earlier one without decoding it. It remembers what
it learned from the earlier request under the bytes of the frame without the correlation id.

The rule for every fast path: it answers only if the handler would now send the same bytes, change the same state
and append the same records. If that is not certain it returns None, and the request takes the general path. So a fast
path checks two things for each request:

* The request is the same. What a frame decodes to depends on its bytes alone, so equal bytes are an equal request.
* Nothing else that the response depends on has changed. Each module here names what that is: the version of a group, a
  loaded and active shard, or the metadata image.

A fast path must not answer from a shard that is loading, has failed or has another owner. It must not answer in a
version that the client is not served. It repeats neither the error of a heartbeat nor a response that reports a defect.
A response that depends on records that are not durable yet waits for them, as a DeferredResponse. If their write fails,
the client gets an error instead.

With an authorizer, `kcoord.server.fast.guarded` makes a fast path forget everything when the ACLs change.

Fast paths run in the event loop and belong to one connection (MetadataResponses to one listener). What they remember is
bounded, and only in memory. `kcoord.fast.paths.enable=false` switches them off, for debugging;
`kcoord.metadata.cache.enable=false` does so for Metadata and DescribeTopicPartitions.

A request path has a table of fast paths by the low byte of their API keys. The fast paths compare the other byte, the
version and the rest of the frame themselves. For each frame the request path calls:

1. `respond(frame, now_ms)`. If it returns a response, the request is done.
2. If `learns_before_handler`, `learn(exchange, now_ms)`: the fast path reads a request of its API that it does not know
   yet, and may answer it.
3. The handler. If not `learns_before_handler` and the handler answered at once, `learn(exchange, now_ms)` follows: the
   exchange has `request`, `response` and `data` by then, and the result is ignored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import ClassVar, Final, TypeAlias

from kcoord.server.api.api_table import DeferredResponse, Exchange
from kcoord_protocol.api_keys import ApiKey

BEFORE_ID: Final = 4
AFTER_ID: Final = 8
"""The position of the correlation id. It follows key and version in a request, and the length in a response."""

TopicName: TypeAlias = Callable[[bytes], str | None]
"""Returns the name of the topic with an id, None if there is no such topic."""

FastResponse = bytes | DeferredResponse | None
"""A framed response, a response that waits for its records, or None: the request takes the general path."""


class FastPath(ABC):
    """Answers requests like earlier ones; the module has the rules and the order of calls."""

    __slots__ = ()

    keys: ClassVar[tuple[ApiKey, ...]]
    learns_before_handler: bool = False

    @abstractmethod
    def respond(self, frame: bytes, now_ms: int) -> FastResponse:
        """Returns the response to a frame that is like an earlier one, or None."""

    @abstractmethod
    def learn(self, exchange: Exchange, now_ms: int) -> FastResponse:
        """Learns from a request that `respond` did not know. May answer it if `learns_before_handler`."""


class Template:
    """A framed response without its correlation id."""

    __slots__ = ("head", "tail")

    def __init__(self, response: bytes) -> None:
        self.head = response[:BEFORE_ID]
        self.tail = response[AFTER_ID:]

    def response_to(self, frame: bytes) -> bytes:
        """Returns the response with the correlation id of the request in `frame`."""
        return self.head + frame[BEFORE_ID:AFTER_ID] + self.tail


def framed_response(frame: bytes, head: bytes, *rest: bytes) -> bytes:
    """Returns `head`, the correlation id of the request in `frame`, and `rest`: a response that is made only once."""
    return b"".join((head, frame[BEFORE_ID:AFTER_ID], *rest))
