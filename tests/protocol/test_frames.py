# SPDX-License-Identifier: Apache-2.0
"""Framing and headers."""

from __future__ import annotations

import random
import tracemalloc
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord_protocol.api_keys import ApiKey, request_class, response_class
from kcoord_protocol.errors import DecodeError, FramingError, UnsupportedVersionError
from kcoord_protocol.framing import (
    FrameReader,
    decode_request_header,
    decode_response_header,
    encode_request,
    encode_response,
    request_header_version,
    response_header_version,
)
from kcoord_protocol.messages import OffsetCommitRequest, OffsetCommitResponse, RequestHeader, ResponseHeader


@given(frames=st.lists(st.binary(max_size=12), max_size=6), cuts=st.lists(st.integers(0, 100), max_size=8))
def test_frames_arrive_whole_however_they_are_cut(frames: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)
    reader = FrameReader(100)
    received = []
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    for start, end in pairwise(edges):
        received += reader.feed(stream[start:end])
    assert received == frames
    assert not reader.has_unfinished_frame


def test_one_byte_at_a_time() -> None:
    reader = FrameReader(100)
    received = [frame for byte in b"\x00\x00\x00\x02hi" for frame in reader.feed(bytearray([byte]))]
    assert received == [b"hi"]


@pytest.mark.parametrize("seed", range(20))
def test_large_frames_arrive_whole_in_pieces_of_any_size(seed: int) -> None:
    rng = random.Random(seed)
    frames = [rng.randbytes(rng.choice((0, 1, 30, 5_000, 60_000))) for _ in range(20)]
    stream = b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)
    reader = FrameReader(100_000)
    received: list[bytes] = []
    at = 0
    while at < len(stream):
        size = rng.choice((1, 3, 100, 4_095, 4_096, 70_000))
        received += reader.feed(memoryview(stream)[at : at + size])
        at += size
        assert reader.has_unfinished_frame == (sum(len(frame) + 4 for frame in received) != min(at, len(stream)))
    assert received == frames


def test_single_bytes_of_a_frame_take_little_more_memory_than_the_frame() -> None:
    reader = FrameReader(1_000_000)
    reader.feed((500_000).to_bytes(4, "big"))
    tracemalloc.start()
    for _ in range(200_000):
        reader.feed(b"x")
    kept_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept_bytes < 300_000


@pytest.mark.parametrize("length", ["ffffffff", "00000065", "7fffffff"])
def test_impossible_lengths(length: str) -> None:
    with pytest.raises(FramingError) as failure:
        FrameReader(100).feed(b"\x00\x00\x00\x01a" + bytes.fromhex(length))
    assert failure.value.frames == [b"a"]


@pytest.mark.parametrize("step", [1, 5, 6, 100])
def test_only_bulk_requests_may_exceed_the_request_limit(step: int) -> None:
    bulk = b"\x00\x00\x00\x14" + b"\x00\x00" + b"r" * 18
    other = b"\x00\x00\x00\x14" + b"\x00\x08" + b"r" * 18
    reader = FrameReader(100, 10, {0})
    frames = [frame for at in range(0, len(bulk), step) for frame in reader.feed(bulk[at : at + step])]
    assert frames == [bulk[4:]]
    with pytest.raises(FramingError, match="request of 20 bytes with api key 8, allowed are 10"):
        # The limit is checked before the body arrives.
        for at in range(0, 8, step):
            reader.feed(other[at : min(at + step, 8)])
    assert FrameReader(100, 10, {0}).feed(b"\x00\x00\x00\x02\x00\x08") == [b"\x00\x08"]


def test_request_header_by_version() -> None:
    for version, header_version in ((7, 1), (8, 2)):
        frame = encode_request(ApiKey.OFFSET_COMMIT, version, 77, "me", b"body")[4:]
        header, position = decode_request_header(frame)
        assert header == RequestHeader(
            request_api_key=8, request_api_version=version, correlation_id=77, client_id="me"
        )
        assert frame[position:] == b"body"
        assert RequestHeader.decode(frame[:position], header_version) == header
        assert request_header_version(8, version) == header_version
    assert encode_request(18, 4, 1, None, b"")[:4] == b"\x00\x00\x00\x0b"


def test_request_header_keeps_tagged_fields() -> None:
    header = RequestHeader(request_api_key=8, request_api_version=8, unknown_tagged_fields=((3, b"x"),))
    frame = header.encode(2) + b"rest"
    assert decode_request_header(frame) == (header, len(frame) - 4)


def test_the_header_of_a_version_that_does_not_exist_is_decoded() -> None:
    header, position = decode_request_header(encode_request(18, 99, 5, "c", b"")[4:])
    assert (header.request_api_version, position) == (99, 12)


@pytest.mark.parametrize(
    ("frame", "path"),
    [
        ("", ""),
        ("0012000400000001ff", ""),
        ("0012000400000001fffe", "client_id"),
        ("0012000400000001000561", "client_id"),
        ("00120004000000010001ff00", "client_id"),
        ("7fff000400000001ffff00", "request_api_key"),
        ("ffff000400000001ffff00", "request_api_key"),
        ("0012000400000001ffff", "<tags>"),
        ("0012000400000001ffff01", "<tags>"),
    ],
)
def test_bad_request_headers(frame: str, path: str) -> None:
    with pytest.raises(DecodeError) as failure:
        decode_request_header(bytes.fromhex(frame))
    assert failure.value.path == path


def test_response_headers() -> None:
    assert encode_response(7, ApiKey.OFFSET_COMMIT, 7, b"xy").hex() == "00000006" + "00000007" + "7879"
    assert encode_response(7, ApiKey.OFFSET_COMMIT, 8, b"xy").hex() == "00000007" + "00000007" + "00" + "7879"
    assert encode_response(7, ApiKey.API_VERSIONS, 4, b"xy").hex() == "00000006" + "00000007" + "7879"
    for version in (7, 8):
        frame = encode_response(-7, 8, version, b"xy")[4:]
        correlation_id, position = decode_response_header(frame, 8, version)
        assert (correlation_id, frame[position:]) == (-7, b"xy")
        assert ResponseHeader.decode(frame[:position], response_header_version(8, version)).correlation_id == -7
    with pytest.raises(DecodeError):
        decode_response_header(b"\x00", 8, 8)


def test_classes_of_apis() -> None:
    assert request_class(8) is OffsetCommitRequest
    assert response_class(ApiKey.OFFSET_COMMIT) is OffsetCommitResponse
    for api_key in (ApiKey.SHARE_FETCH, -1, 999):
        with pytest.raises(UnsupportedVersionError):
            request_class(api_key)
    for api in ApiKey:
        try:
            classes = request_class(api), response_class(api)
        except UnsupportedVersionError:
            continue
        assert [cls.api_key for cls in classes] == [api, api]
