# SPDX-License-Identifier: Apache-2.0
"""What the fast paths have in common: their interface, and how a response gets the correlation id of its request.

A fast path answers requests that are like earlier ones without decoding them. It remembers what it learned from a
request under the bytes of the frame without the correlation id. Each of them answers exactly as the handler would, or
returns None, and the request takes the general way. `kcoord.fast.paths.enable=false` switches them off, for debugging;
`kcoord.metadata.cache.enable=false` does so for Metadata and DescribeTopicPartitions.

A request path holds a table of fast paths by the low byte of their API keys. The fast paths compare the other byte, the
version and the rest of the frame themselves. Per frame:

1. `answer(frame, now_ms)`. If it returns a response, that is all.
2. If `learns_before_handler`, `learn(exchange, now_ms)`: the fast path reads a request of its API that it does not know
   yet, and may answer it.
3. The handler. If not `learns_before_handler` and the handler answered at once, `learn(exchange, now_ms)`: the exchange
   has `request`, `response` and `data` by then, and the result is ignored.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Final

from kcoord.server.api.api_table import DeferredResponse, Exchange
from kcoord_protocol.api_keys import ApiKey

BEFORE_ID: Final = 4
AFTER_ID: Final = 8
"""A request begins with key, version and correlation id; a response with length and correlation id."""

FastAnswer = bytes | DeferredResponse | None
"""A framed response, one that waits for its records, or None: the general way."""


class FastPath(ABC):
    """See the module's text."""

    __slots__ = ()

    keys: ClassVar[tuple[ApiKey, ...]]
    learns_before_handler: ClassVar[bool] = False

    @abstractmethod
    def answer(self, frame: bytes, now_ms: int) -> FastAnswer:
        """The response to a frame that is like an earlier one."""

    @abstractmethod
    def learn(self, exchange: Exchange, now_ms: int) -> FastAnswer:
        """Remembers what can be known of a request that `answer` did not know."""


class Template:
    """A framed response without its correlation id."""

    __slots__ = ("head", "tail")

    def __init__(self, response: bytes) -> None:
        self.head = response[:BEFORE_ID]
        self.tail = response[AFTER_ID:]

    def answer_to(self, frame: bytes) -> bytes:
        """The response with the correlation id of the request in `frame`."""
        return self.head + frame[BEFORE_ID:AFTER_ID] + self.tail


def response_to(frame: bytes, head: bytes, *rest: bytes) -> bytes:
    """The same for a response whose parts are not worth keeping together."""
    return b"".join((head, frame[BEFORE_ID:AFTER_ID], *rest))
