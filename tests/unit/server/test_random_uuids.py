# SPDX-License-Identifier: Apache-2.0
"""Random identifiers: their form, their source, and how often it is read."""

from __future__ import annotations

import uuid
from random import Random

from kcoord.server.environment import RandomUuids
from kcoord_protocol.uuid import uuid_from_string


def test_identifiers_are_random_uuids_of_the_given_source() -> None:
    first, second = RandomUuids(Random(1).randbytes), RandomUuids(Random(1).randbytes)
    taken = [first.take() for _ in range(1000)]
    assert taken == [second.take() for _ in range(1000)]
    assert len(set(taken)) == 1000
    assert {uuid.UUID(bytes=value).version for value in taken} == {4}
    assert {uuid.UUID(bytes=value).variant for value in taken} == {uuid.RFC_4122}


def test_the_source_is_read_once_for_many_identifiers() -> None:
    sizes: list[int] = []

    def read(size: int) -> bytes:
        sizes.append(size)
        return bytes(size)

    uuids = RandomUuids(read)
    for _ in range(257):
        uuids.take()
    assert sizes == [4096, 4096]


def test_a_text_never_looks_like_an_option() -> None:
    dash_first = bytes([0xF8]) + bytes(15)
    plain = bytes(range(16))
    uuids = RandomUuids(lambda size: (dash_first + plain) * (size // 32))
    texts = [uuids.take_text() for _ in range(100)]
    assert len(texts[0]) == 22 and not any(text.startswith("-") for text in texts)
    assert uuid_from_string(texts[0])[:6] == plain[:6]


def test_session_ids_are_positive_31_bit_numbers() -> None:
    for byte in (b"\x00", b"\xff"):
        uuids = RandomUuids(lambda size, byte=byte: byte * size)  # type: ignore[misc]
        assert 1 <= uuids.take_session_id() <= 2**31 - 1
