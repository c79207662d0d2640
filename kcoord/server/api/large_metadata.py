# SPDX-License-Identifier: Apache-2.0
"""Large responses to Metadata requests for all topics: a thread makes each once, and equal requests share it.

As in `kcoord.server.fast.metadata`, such a response depends on the request, the listener and the metadata image alone.
It is dropped when the image is another object. After a change of the image, all clients ask again at about the same
time, and wait for the same response. Responses that depend on the rights of a client are not shared.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from kcoord.metadata.image import MetadataImage
from kcoord.server.large_responses import EncodedResponse

if TYPE_CHECKING:
    from kcoord.server.api.api_table import RequestContext
    from kcoord_protocol.messages import MetadataRequest, MetadataResponse

_MOST_RESPONSES: Final = 4

Key: TypeAlias = tuple[str, int, bool, bool]
"""The listener, the version, and whether the response has the operations on the cluster and on each topic."""


class LargeMetadata:
    """The responses that were made from the newest image, or are being made."""

    __slots__ = ("_image", "_responses")

    def __init__(self) -> None:
        self._image: MetadataImage | None = None
        self._responses: dict[Key, asyncio.Task[MetadataResponse]] = {}

    def respond(
        self,
        context: RequestContext,
        request: MetadataRequest,
        image: MetadataImage,
        start: Callable[[], asyncio.Task[MetadataResponse]],
    ) -> asyncio.Future[MetadataResponse]:
        """Returns the future of the response that `start` begins to make from the image."""
        if context.rights is not None or request.topics:
            return start()
        if image is not self._image:
            self._image, self._responses = image, {}
        key = (
            context.client.listener_name,
            context.api_version,
            request.include_cluster_authorized_operations,
            request.include_topic_authorized_operations,
        )
        shared = self._responses.get(key)
        if shared is None or (shared.done() and (shared.cancelled() or shared.exception() is not None)):
            if len(self._responses) >= _MOST_RESPONSES:
                self._responses.clear()
            shared = self._responses[key] = start()
        return asyncio.ensure_future(_copy(shared))


async def _copy(shared: asyncio.Task[MetadataResponse]) -> MetadataResponse:
    """Returns a response with a throttle time of its own. If the client is gone, other clients still wait for it."""
    response: object = await asyncio.shield(shared)
    assert isinstance(response, EncodedResponse)
    return cast("MetadataResponse", response.copy())
