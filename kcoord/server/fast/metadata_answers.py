# SPDX-License-Identifier: Apache-2.0
"""The fast path of Metadata and DescribeTopicPartitions: equal bytes get equal bytes while the image is the same one.

Such an answer depends on the request, the listener, static configs and the metadata image alone (dynamic configs come
with an image). So the bytes but for the correlation id are the key, one listener has one cache, and every answer goes
when `Broker.image` is another object: a topic, config, feature or broker has changed, or the metadata log was read
again. A connection asks only in versions that it is served (`kcoord.kip1327.revisions`). Only what was answered at
once is kept, never what created a topic. Authorization will have to join the key.
`kcoord.metadata.cache.enable=false` switches it off, for debugging.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors

if TYPE_CHECKING:
    from kcoord.metadata.image import MetadataImage
    from kcoord_protocol.messages import DescribeTopicPartitionsResponse, MetadataResponse

METADATA_KEYS: Final = frozenset({int(ApiKey.METADATA), int(ApiKey.DESCRIBE_TOPIC_PARTITIONS)})

MAX_BYTES: Final = 16 * 1024 * 1024
"""What the requests and answers of one listener may take; the oldest go first."""

_LARGEST_SHARE: Final = 4
_ENTRY_OVERHEAD_BYTES: Final = 256
_BEFORE_ID: Final = 4
_AFTER_ID: Final = 8
"""A request begins with key, version and correlation id; an answer with length and correlation id."""


class MetadataAnswers:
    """See the module's text; `max_bytes` bounds requests, answers and a guess of what Python adds."""

    __slots__ = ("_answers", "_image", "_max_bytes", "_size_bytes")

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._answers: dict[bytes, tuple[bytes, bytes]] = {}
        self._image: MetadataImage | None = None
        self._max_bytes = max_bytes
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def answer(self, frame: bytes, image: MetadataImage) -> bytes | None:
        """The framed answer, if the same was asked of this image before."""
        if image is not self._image:
            self._answers.clear()
            self._size_bytes = 0
            self._image = image
            return None
        entry = self._answers.get(frame[:_BEFORE_ID] + frame[_AFTER_ID:])
        if entry is None:
            return None
        return entry[0] + frame[_BEFORE_ID:_AFTER_ID] + entry[1]

    def remember(self, frame: bytes, image: MetadataImage, response: object, answer: bytes) -> None:
        """Keep what `frame` was just answered at once, out of `image`."""
        size_bytes = _size_bytes(len(frame), len(answer))
        if (
            image is not self._image
            or size_bytes * _LARGEST_SHARE > self._max_bytes
            or not _is_regular(frame[1], response)
        ):
            return
        answers = self._answers
        while self._size_bytes + size_bytes > self._max_bytes:
            oldest = next(iter(answers))
            head, tail = answers.pop(oldest)
            self._size_bytes -= _size_bytes(len(oldest) + _BEFORE_ID, len(head) + len(tail) + _BEFORE_ID)
        answers[frame[:_BEFORE_ID] + frame[_AFTER_ID:]] = (answer[:_BEFORE_ID], answer[_AFTER_ID:])
        self._size_bytes += size_bytes


def _size_bytes(frame_bytes: int, answer_bytes: int) -> int:
    return frame_bytes + answer_bytes + _ENTRY_OVERHEAD_BYTES


def _is_regular(api_key: int, response: object) -> bool:
    """Not an answer that stands for a defect: the next request shall try again, and log again."""
    if api_key == ApiKey.METADATA:
        return bool(cast("MetadataResponse", response).brokers)
    topics = cast("DescribeTopicPartitionsResponse", response).topics
    return bool(topics) and all(topic.error_code != Errors.UNKNOWN_SERVER_ERROR for topic in topics)
