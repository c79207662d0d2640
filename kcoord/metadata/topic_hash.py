# SPDX-License-Identifier: Apache-2.0
"""Kafka's digest of what an assignment depends on: id, name and partitions of a topic, with the racks of the replicas.

The values are those of Apache Kafka 4.3.1 and 4.4.0 (XXH3 over a stream of little-endian values), so the records of a
group that comes from Kafka say whether its topics have changed since. Each state of a topic is digested once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from struct import Struct, pack

from xxhash import xxh3_64_intdigest

from kcoord.metadata.image import MetadataImage, TopicImage

_INT = Struct("<i")
_LONG = Struct("<q")
_FORMAT_BYTE = b"\0"
"""Kafka's version of the input."""


def metadata_hash(image: MetadataImage, topic_names: Iterable[str]) -> int:
    """Returns the digest of several topics, as a signed 64-bit number. It skips topics that do
    not exist, and returns 0 if no topic exists.
    """
    racks = image.racks
    topics = [topic for name in sorted(topic_names) if (topic := image.topics.get(name)) is not None]
    return _signed_digest(b"".join([_LONG.pack(topic_hash(topic, racks)) for topic in topics])) if topics else 0


def topic_hash(topic: TopicImage, racks: Mapping[int, str]) -> int:
    """Returns the digest of one topic, as a signed 64-bit number. `racks` are those of the brokers, by broker id."""
    cached = topic.hashed
    if cached is not None and cached[0] == racks:
        return cached[1]
    value = _signed_digest(_head(topic) + _partitions(topic, racks))
    topic.hashed = racks, value
    return value


def _head(topic: TopicImage) -> bytes:
    halves = topic.id[7::-1] + topic.id[:7:-1]
    return _FORMAT_BYTE + halves + _text(topic.name) + _INT.pack(len(topic.partitions))


def _partitions(topic: TopicImage, racks: Mapping[int, str]) -> bytes:
    count = len(topic.partitions)
    if not racks:
        return pack(f"<{count}i", *range(count))
    # Few combinations of replicas make up most topics, so each is looked up in `racks` once.
    suffixes: dict[tuple[int, ...], bytes] = {}
    parts = []
    for number, partition in enumerate(topic.partitions):
        replicas = tuple(partition.replicas)
        suffix = suffixes.get(replicas)
        if suffix is None:
            suffix = suffixes[replicas] = _racks(replicas, racks)
        parts.append(_INT.pack(number) + suffix)
    return b"".join(parts)


def _racks(replicas: Sequence[int], racks: Mapping[int, str]) -> bytes:
    """Sorted by UTF-16 code units, as Java does; the length of each rack stands before and behind it."""
    names = sorted((racks[replica] for replica in replicas if replica in racks), key=_utf16_order)
    return b"".join([_INT.pack(len(_utf16(name)) // 2) + _text(name) for name in names])


def _text(text: str) -> bytes:
    encoded = _utf16(text)
    return encoded + _INT.pack(len(encoded) // 2)


def _utf16(text: str) -> bytes:
    return text.encode("utf-16-le", "surrogatepass")


def _utf16_order(text: str) -> bytes:
    return text.encode("utf-16-be", "surrogatepass")


def _signed_digest(data: bytes) -> int:
    return int.from_bytes(xxh3_64_intdigest(data).to_bytes(8, "big"), "big", signed=True)
