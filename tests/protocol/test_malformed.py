# SPDX-License-Identifier: Apache-2.0
"""Bytes from a hostile peer: the only error is DecodeError, no read leaves the frame, and memory stays bounded."""

from __future__ import annotations

import random
import tracemalloc

import pytest

from kcoord_protocol import reference
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    ConsumerGroupHeartbeatRequest,
    DeleteTopicsRequest,
    DescribeGroupsRequest,
    InitProducerIdRequest,
    MetadataResponse,
    OffsetCommitRequest,
    ProduceRequest,
    message_class,
)
from kcoord_protocol.primitives import encode_uvarint
from tests.protocol.samples import ALL_NAMES, full_sample


def decodes_alike(cls: type[Message], data: bytes, version: int) -> bool:
    """Return whether the bytes are a message; compiled code and the reference codec must agree."""
    try:
        message = cls.decode(data, version)
    except DecodeError:
        message = None
    try:
        expected, end = reference.decode_message(cls, data, 0, version)
    except DecodeError:
        assert message is None
        return False
    if end != len(data):
        assert message is None
        return False
    assert message is not None
    assert repr(message) == repr(expected)
    return True


@pytest.mark.parametrize("name", ALL_NAMES)
def test_truncation_at_every_byte(name: str) -> None:
    cls = message_class(name)
    version = cls.valid_versions[-1]
    data = full_sample(cls, version).encode(version)
    for size in range(len(data)):
        with pytest.raises(DecodeError):
            cls.decode(data[:size], version)
    with pytest.raises(DecodeError, match="after the end"):
        cls.decode(data + b"\x00", version)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_damaged_bytes(name: str) -> None:
    cls = message_class(name)
    chance = random.Random(name)
    for version in {cls.valid_versions[0], cls.valid_versions[-1]}:
        data = full_sample(cls, version).encode(version)
        for _ in range(40):
            damaged = bytearray(data)
            for _ in range(chance.randint(1, 3)):
                if damaged:
                    damaged[chance.randrange(len(damaged))] = chance.choice(
                        (0, 1, 0x7F, 0x80, 0xFF, chance.randrange(256))
                    )
            decodes_alike(cls, bytes(damaged), version)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_random_bytes(name: str) -> None:
    cls = message_class(name)
    chance = random.Random(name)
    for _ in range(20):
        decodes_alike(cls, chance.randbytes(chance.randrange(80)), chance.choice(cls.valid_versions))


def test_huge_counts_allocate_nothing() -> None:
    tracemalloc.start()
    try:
        for data, version in (
            (b"\x00\x01g\x00\x00\x00\x00\x00\x00" + b"\x7f\xff\xff\xff" * 4, 2),
            (b"\x02g\x00" + b"\xff\xff\xff\xff\x0f" * 4, 9),
        ):
            with pytest.raises(DecodeError):
                OffsetCommitRequest.decode(data, version)
        with pytest.raises(DecodeError):
            ApiVersionsRequest.decode(b"\xff\xff\xff\xff\x07" + b"x" * 10, 3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 2_000_000


def test_memory_is_a_small_multiple_of_the_frame() -> None:
    frame = b"\xff\xff\x03" + b"\x01" * 65534 + b"\x00\x00\x00\x01" + b"\x00"
    DeleteTopicsRequest.decode(frame, 5)
    tracemalloc.start()
    try:
        message = DeleteTopicsRequest.decode(frame, 5)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(message.topic_names) == 65534
    assert peak < 16 * len(frame)


@pytest.mark.parametrize("name", ["MetadataRequest", "FetchResponse", "CreateTopicsRequest", "OffsetFetchRequest"])
def test_smallest_elements_stay_bounded(name: str) -> None:
    """Zeroes and ones make the densest arrays. Memory stays below two orders of magnitude above the frame."""
    cls = message_class(name)
    version = cls.valid_versions[-1]
    for fill in (b"\x00", b"\x01", b"\x02", b"\x7f"):
        tracemalloc.start()
        try:
            with pytest.raises(DecodeError):
                cls.decode(fill * 20_000, version)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 100 * 20_000 + 1_000_000


@pytest.mark.parametrize(
    ("cls", "version", "data", "path", "reason"),
    [
        (ConsumerGroupHeartbeatRequest, 0, "00", "group_id", "null"),
        (ConsumerGroupHeartbeatRequest, 0, "0267" + "03c328", "member_id", "UTF-8"),
        (ConsumerGroupHeartbeatRequest, 0, "0267" + "016d", "member_epoch", "4 bytes announced, 1 left"),
        (ConsumerGroupHeartbeatRequest, 0, "0267016d" + "0000", "member_epoch", "left"),
        (ApiVersionsRequest, 3, "808080808001", "client_software_name", "5 bytes"),
        (ApiVersionsRequest, 3, "ffffffff1f", "client_software_name", "32 bits"),
        (ApiVersionsRequest, 3, "8180027f", "client_software_name", "string of 32768 bytes"),
        (ApiVersionsRequest, 3, "80", "client_software_name", "inside a varint"),
        (ApiVersionsRequest, 3, "0101" + "020100" + "0100", "<tags>[1]", "twice"),
        (ApiVersionsRequest, 3, "0101" + "010109", "<tags>[1]", "9 bytes announced"),
        (ApiVersionsRequest, 3, "0101" + "05", "<tags>", "5 tagged fields"),
        (ApiVersionsRequest, 3, "0101" + "914e" + "00" * 40000, "<tags>", "10001 tagged fields, allowed are 10000"),
        (DescribeGroupsRequest, 0, "000f4241" + "0000" * 1_000_001, "groups", "1000001 elements, allowed are 1000000"),
        (OffsetCommitRequest, 2, "000167" + "00000000" + "00056d", "member_id", "5 bytes announced, 1 left"),
        (OffsetCommitRequest, 2, "fffe", "group_id", "length -2"),
        (OffsetCommitRequest, 2, "0000" + "00000000" + "0000" + "0000000000000000" + "ffffffff", "topics", "null"),
        (
            OffsetCommitRequest,
            2,
            "0000" + "00000000" + "0000" + "0000000000000000" + "00000001" + "000174" + "00000002"
            + "00000000" + "0000000000000001" + "ffff" + "00000001" + "0000000000000001" + "0005",
            "topics[0].partitions[1].committed_metadata",
            "5 bytes announced, 0 left",
        ),
    ],
)  # fmt: skip
def test_the_path_names_the_field(cls: type[Message], version: int, data: str, path: str, reason: str) -> None:
    with pytest.raises(DecodeError) as failure:
        cls.decode(bytes.fromhex(data), version)
    assert failure.value.path == path
    assert reason in failure.value.reason
    assert str(failure.value) == f"{path}: {failure.value.reason}"


def test_prefix_offset_outside_the_data() -> None:
    for offset in (-1, 1, 2**40):
        with pytest.raises(DecodeError):
            MetadataResponse.decode_prefix(b"", offset, 0)


def test_the_search_for_the_wrong_field_is_limited() -> None:
    count = 200_000
    frame = encode_uvarint(count + 1)
    with pytest.raises(DecodeError, match="beyond the values") as failure:
        DeleteTopicsRequest.decode(frame + b"\x01" * count, 5)
    assert failure.value.path == ""


def test_lengths_that_take_more_bytes_than_they_need() -> None:
    """Kafka accepts them too, also for the length of null."""
    null, empty = b"\x80\x00", b"\x81\x00"
    rest = b"\x00\x00\x00\x0a\x00"
    for length, text in ((null, None), (empty, "")):
        assert decodes_alike(InitProducerIdRequest, length + rest, 2)
        assert InitProducerIdRequest.decode(length + rest, 2).transactional_id == text
    produce = ProduceRequest(
        topic_data=[ProduceRequest.TopicProduceData(partition_data=[ProduceRequest.PartitionProduceData(records=None)])]
    ).encode(9)
    for length, records in ((null, None), (empty, b"")):
        longer = produce[:-4] + length + produce[-3:]
        assert decodes_alike(ProduceRequest, longer, 9)
        assert ProduceRequest.decode(longer, 9).topic_data[0].partition_data[0].records == records
