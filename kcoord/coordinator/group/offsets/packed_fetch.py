# SPDX-License-Identifier: Apache-2.0
"""The fast path of OffsetFetch v8 and later, which copies the packed rows into the response.

**Invariant.** `PackedFetch.encode` returns the bytes of the OffsetFetchResponseGroup that `operations.fetch_offsets`
would return, or None. None means that the request takes the general path, because it is rejected or a requested offset
has metadata. The row numbers of partitions are remembered until `TopicOffsets.layout` changes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from kcoord.coordinator.group.group import Group
from kcoord.coordinator.group.offsets.committed_offsets import (
    CELL,
    CELL_BYTES,
    CELL_END,
    CommittedOffsets,
    TopicOffsets,
)
from kcoord.coordinator.group.offsets.operations import INVALID_OFFSET, NO_LEADER_EPOCH, may_fetch
from kcoord.metadata.image import MetadataImage
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.primitives import encode_uvarint
from kcoord_protocol.uuid import ZERO_UUID

if TYPE_CHECKING:
    from kcoord_protocol.messages import OffsetFetchRequest

FIRST_VERSION: Final = 8
FIRST_VERSION_WITH_TOPIC_IDS: Final = 10

_NO_TAGS: Final = b"\0"
_GROUP_END: Final = b"\0\0\0"
"""No error, no tags."""


def _compact(text: str) -> bytes:
    data = text.encode()
    return encode_uvarint(len(data) + 1) + data


class _RequestedTopic:
    """A topic of a request by name (v8, v9) or id (v10), and the rows of its partitions at the last lookup."""

    __slots__ = ("_layout", "_pieces", "_place", "_start", "name", "partitions", "topic_id")

    def __init__(self, topic: OffsetFetchRequest.OffsetFetchRequestTopics, version: int) -> None:
        self.name = topic.name
        self.topic_id = topic.topic_id if version >= FIRST_VERSION_WITH_TOPIC_IDS else ZERO_UUID
        self.partitions = tuple(topic.partition_indexes)
        named = topic.topic_id if version >= FIRST_VERSION_WITH_TOPIC_IDS else _compact(topic.name)
        self._start = named + encode_uvarint(len(self.partitions) + 1)
        self._place: TopicOffsets | None = None
        self._layout = -1
        self._pieces: list[slice | bytes] = []

    def append_to(self, answer: list[bytes], place: TopicOffsets | None) -> bool:
        """Appends the topic's part of the response; returns False if the rows are not sufficient."""
        if place is not None:
            if place.notes is not None:
                return False
            if place.topic_id != self.topic_id and place.topic_id != ZERO_UUID != self.topic_id:
                place = None
        if place is not self._place or (place is not None and place.layout != self._layout) or self._layout < 0:
            self._find(place)
        answer.append(self._start)
        cells = place.cells if place is not None else b""
        answer += [bytes(cells[piece]) if type(piece) is slice else piece for piece in self._pieces]
        answer.append(_NO_TAGS)
        return True

    def _find(self, place: TopicOffsets | None) -> None:
        """Looks up the rows; contiguous rows become one piece."""
        pieces: list[slice | bytes] = []
        for partition in self.partitions:
            row = place.row_of(partition) if place is not None else None
            last = pieces[-1] if pieces else None
            if row is None:
                pieces.append(CELL.pack(partition, INVALID_OFFSET, NO_LEADER_EPOCH, CELL_END))
            elif isinstance(last, slice) and last.stop == row * CELL_BYTES:
                pieces[-1] = slice(last.start, last.stop + CELL_BYTES)
            else:
                pieces.append(slice(row * CELL_BYTES, (row + 1) * CELL_BYTES))
        self._pieces = pieces
        self._place, self._layout = place, place.layout if place is not None else 0


class PackedFetch:
    """A request for the offsets of one group."""

    __slots__ = ("_by_id", "_names_member", "_request", "_start", "_topics", "_topics_start", "group_id", "version")

    def __init__(self, request: OffsetFetchRequest.OffsetFetchRequestGroup, version: int) -> None:
        self.group_id = request.group_id
        self.version = version
        self._request = request
        self._start = _compact(request.group_id)
        self._names_member = request.member_id is not None or request.member_epoch >= 0
        self._by_id = version >= FIRST_VERSION_WITH_TOPIC_IDS
        self._topics = None if request.topics is None else [_RequestedTopic(topic, version) for topic in request.topics]
        self._topics_start = self._start + encode_uvarint(len(self._topics or ()) + 1)

    def encode(self, group: Group | None, offsets: CommittedOffsets, image: MetadataImage) -> bytes | None:
        """Returns the encoded OffsetFetchResponseGroup, or None if the request takes the general path.

        The caller ensures that no pending offset makes the response unstable.
        """
        if self._names_member:
            try:
                may_fetch(group, self._request)
            except KafkaError:
                return None
        places = offsets.packed(self.group_id)
        if self._topics is None:
            return self._all(places, image)
        answer = [self._topics_start]
        for topic in self._topics:
            if self._by_id:
                existing = image.topics_by_id.get(topic.topic_id)
                if existing is None:
                    return None
                topic.name = existing.name
            if not topic.append_to(answer, places.get(topic.name)):
                return None
        answer.append(_GROUP_END)
        return b"".join(answer)

    def _all(self, places: Mapping[str, TopicOffsets], image: MetadataImage) -> bytes | None:
        """Returns the response with all offsets of the group; None if an offset has metadata.

        v10 identifies topics by id only. A deleted topic has none, so its offsets are omitted.
        """
        topics: list[bytes] = []
        count = 0
        for name, place in sorted(places.items()):
            if place.notes is not None:
                return None
            if self.version >= FIRST_VERSION_WITH_TOPIC_IDS:
                existing = image.topics.get(name)
                if existing is None:
                    continue
                named = existing.id
            else:
                named = _compact(name)
            count += 1
            topics += named, encode_uvarint(len(place) + 1), bytes(place.cells), _NO_TAGS
        return b"".join([self._start, encode_uvarint(count + 1), *topics, _GROUP_END])
