# SPDX-License-Identifier: Apache-2.0
"""Varints, uuids, error codes, the schema language and the type stubs."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kcoord_protocol
from kcoord_protocol import primitives, stubs
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.schema import MessageSchema, SchemaError, attribute_name, parse_versions
from kcoord_protocol.uuid import ZERO_UUID, hyphenated_uuid, uuid_from_string, uuid_to_string
from tests.support.shared import shared


@given(st.integers(-(2**63), 2**63 - 1))
def test_varints(value: int) -> None:
    assert primitives.decode_varlong(primitives.encode_varlong(value) + b"\xff", 0)[0] == value
    assert primitives.decode_uvarlong(primitives.encode_uvarint(value & (2**64 - 1)), 0)[0] == value & (2**64 - 1)
    narrow = (value & (2**32 - 1)) - 2**31
    encoded = primitives.encode_varint(narrow)
    assert primitives.decode_varlong(b"x" + encoded, 1) == (narrow, 1 + len(encoded))


@pytest.mark.parametrize(
    ("value", "encoded"), [(0, "00"), (-1, "01"), (1, "02"), (63, "7e"), (-64, "7f"), (64, "8001"), (300, "d804")]
)
def test_zigzag_bytes(value: int, encoded: str) -> None:
    assert primitives.encode_varint(value).hex() == primitives.encode_varlong(value).hex() == encoded


def test_varints_that_do_not_fit() -> None:
    for data in (b"\x80" * 5 + b"\x01", b"\xff" * 4 + b"\x10"):
        with pytest.raises(ValueError):
            primitives.decode_uvarint(data, 0)
    for data in (b"\x80" * 10 + b"\x01", b"\xff" * 9 + b"\x02"):
        with pytest.raises(ValueError):
            primitives.decode_uvarlong(data, 0)
    with pytest.raises(IndexError):
        primitives.decode_uvarint(b"\x80", 0)
    for encode, value in (
        (primitives.encode_uvarint, -1),
        (primitives.encode_varint, 2**31),
        (primitives.encode_varlong, -(2**63) - 1),
    ):
        with pytest.raises(ValueError):
            encode(value)


@given(st.binary(min_size=16, max_size=16))
def test_uuids(uuid: bytes) -> None:
    text = uuid_to_string(uuid)
    assert len(text) == 22
    assert uuid_from_string(text) == uuid
    assert hyphenated_uuid(uuid) == str(UUID(bytes=uuid))


@pytest.mark.parametrize("text", ["", "x", "A" * 21, "A" * 21 + "B", "A" * 23, "!" * 22, "é" * 22, "A" * 20 + "+/"])
def test_invalid_uuids(text: str) -> None:
    with pytest.raises(ValueError, match="not a uuid"):
        uuid_from_string(text)


def test_uuid_of_zeroes() -> None:
    assert uuid_to_string(ZERO_UUID) == "A" * 22
    with pytest.raises(ValueError, match="16 bytes"):
        uuid_to_string(b"")
    with pytest.raises(ValueError, match="16 bytes"):
        hyphenated_uuid(bytes(17))


def test_error_codes() -> None:
    assert int(Errors.NONE) == 0
    assert Errors(25) is Errors.UNKNOWN_MEMBER_ID
    assert Errors.NOT_COORDINATOR.retriable
    assert all(error.description.endswith(".") for error in Errors)
    assert len({error.description for error in Errors}) == len(Errors)
    assert str(KafkaError(Errors.INVALID_REQUEST, "no topics")) == "INVALID_REQUEST: no topics"
    assert KafkaError(Errors.NONE).message is None
    # A text with a name of a request still fits into a string of the response.
    message = KafkaError(Errors.INVALID_REQUEST, "name " + "\U0001f600" * 0x7FFF).message
    assert message is not None
    assert message.startswith("name ") and len(message.encode()) <= 0x7FFF


def test_error_codes_are_kafkas() -> None:
    lines = shared("kafka-facts-4.4.0", "errors.tsv").read_text().splitlines()
    expected = {tuple(line.split("\t")) for line in lines}
    kafkas = set(Errors) - {Errors.INVALID_ASSIGNMENT}
    assert {(str(int(e)), e.name, str(e.retriable).lower()) for e in kafkas} == expected


@pytest.mark.parametrize(
    ("name", "attribute"),
    [
        ("GroupId", "group_id"),
        ("ISR", "isr"),
        ("IsKRaftController", "is_k_raft_controller"),
        ("TopicID", "topic_id"),
        ("From", "from_"),
    ],
)
def test_attribute_names(name: str, attribute: str) -> None:
    assert attribute_name(name) == attribute


def test_versions() -> None:
    assert parse_versions("2-4") == range(2, 5)
    assert parse_versions("3") == range(3, 4)
    assert 30000 in parse_versions("3+")
    assert not parse_versions("none")
    with pytest.raises(SchemaError):
        parse_versions("two")


def message_with(*fields: Any) -> MessageSchema:
    return MessageSchema({"name": "M", "type": "data", "validVersions": "0", "fields": list(fields)})


@pytest.mark.parametrize(
    "field",
    [
        {"type": "string", "versions": "0+"},
        {"name": "A", "type": "text", "versions": "0+"},
        {"name": "A", "type": "[]Absent", "versions": "0+"},
        {"name": "A", "type": "int8", "versions": "0+", "tag": 0},
        {"name": "A", "type": "int8", "versions": "0+", "taggedVersions": "0+"},
        {"name": "A", "type": "bool", "versions": "0+", "default": "maybe"},
        {"name": "A", "type": "int8", "versions": "0+", "default": "x"},
        {"name": "A", "type": "S", "versions": "0+", "fields": {}},
    ],
)
def test_schemas_that_break_the_rules(field: dict[str, Any]) -> None:
    with pytest.raises(SchemaError):
        message_with(field)


def test_duplicate_names() -> None:
    field = {"name": "A", "type": "int8", "versions": "0+"}
    struct = {"name": "B", "type": "S", "versions": "0+", "fields": []}
    with pytest.raises(SchemaError, match="twice"):
        message_with(field, field)
    with pytest.raises(SchemaError, match="twice"):
        message_with(struct, struct | {"name": "C"})


def test_the_stub_is_up_to_date(capsys: pytest.CaptureFixture[str]) -> None:
    assert stubs.main(["--check"]) == 0
    assert stubs.main(["--what"]) == 2
    assert "usage" in capsys.readouterr().err


def test_the_package_has_its_type_files() -> None:
    assert Path(kcoord_protocol.__file__).with_name("py.typed").exists()
    assert Path(kcoord_protocol.__file__).with_name("messages.pyi").exists()
