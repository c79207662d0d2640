# SPDX-License-Identifier: Apache-2.0
"""The exact limits, in addition to `tests/transcripts/consumer/limits.txt`.

They are the lengths of ids, the groups of a partition, and the size of a classic group's record.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.classic.rebalance import (
    GROUP_METADATA_VALUE_VERSION,
    group_metadata_record,
    is_too_large,
    size_bytes,
)
from kcoord.runtime.result import MAX_BATCH_BYTES
from kcoord.runtime.serde import PackedBatch
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import GroupMetadataValue
from kcoord_protocol.record_batch import encode_records
from tests.unit.group.classic_members import ClassicConsumer
from tests.unit.group.group_context import DEFAULTS, SERDE, GroupContext

MAX_ID_BYTES = 20


def error_of(call: Callable[[], object]) -> Errors:
    try:
        call()
    except KafkaError as error:
        return error.error
    return Errors.NONE


REQUESTS: dict[str, tuple[Callable[[GroupContext, str], object], Errors]] = {
    "group of a consumer": (lambda c, text: c.join(text, "m", ["t"]), Errors.INVALID_GROUP_ID),
    "group of a classic consumer": (
        lambda c, text: ClassicConsumer(c, text, "m", ["t"]).join_once(),
        Errors.INVALID_GROUP_ID,
    ),
    "group of a commit": (lambda c, text: c.commit(text, {"t": {0: 1}}), Errors.INVALID_GROUP_ID),
    "member": (lambda c, text: c.join("g", text, ["t"]), Errors.INVALID_REQUEST),
    "instance": (lambda c, text: c.join("g", "m", ["t"], instance=text), Errors.INVALID_REQUEST),
    "classic instance": (
        lambda c, text: ClassicConsumer(c, "g", "m", ["t"], instance=text).join_once(),
        Errors.INVALID_REQUEST,
    ),
}


@pytest.mark.parametrize("place", REQUESTS)
@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("x" * MAX_ID_BYTES, True),
        ("x" * (MAX_ID_BYTES + 1), False),
        ("é" * 10, True),
        ("é" * 10 + "x", False),
        ("日" * 6 + "xx", True),
        ("日" * 7, False),
    ],
)
def test_the_limit_of_an_id_counts_bytes_of_utf_8(place: str, text: str, fits: bool) -> None:
    context = GroupContext({"t": 1}, {"kcoord.max.id.bytes": str(MAX_ID_BYTES)})
    request, error = REQUESTS[place]
    assert error_of(lambda: request(context, text)) is (Errors.NONE if fits else error)


def test_a_partition_has_at_most_as_many_groups_as_the_limit() -> None:
    context = GroupContext({"t": 1}, {"kcoord.partition.max.groups": "3"})
    joins = [error_of(lambda: context.join(f"g{number}", "m", ["t"])) for number in range(4)]  # noqa: B023
    assert joins == [Errors.NONE, Errors.NONE, Errors.NONE, Errors.POLICY_VIOLATION]


def test_a_group_that_is_older_than_the_limits_stays_usable() -> None:
    context = GroupContext({"t": 1})
    name = "x" * MAX_ID_BYTES
    context.commit(name, {"t": {0: 1}})
    context.commit("other", {"t": {0: 1}})
    context.config = BrokerConfig.from_properties(
        DEFAULTS | {"kcoord.max.id.bytes": "10", "kcoord.partition.max.groups": "1"}
    )
    context.restart()
    assert error_of(lambda: context.commit(name, {"t": {0: 2}})) is Errors.NONE
    assert error_of(lambda: context.join(name, "m", ["t"])) is Errors.NONE
    assert error_of(lambda: context.join("g", "m", ["t"])) is Errors.POLICY_VIOLATION


@pytest.mark.parametrize(("character", "fitting"), [("x", 4_096), ("é", 4_096), ("日", 4_096), ("😀", 2_048)])
def test_the_limit_of_metadata_counts_characters_as_java_does(character: str, fitting: int) -> None:
    """Observed in Kafka 4.4.0, although the key is called offset.metadata.max.bytes."""
    context = GroupContext({"t": 1})
    assert context.commit("g", {"t": {0: 1}}, metadata=character * fitting) == {("t", 0): Errors.NONE}
    refused = context.commit("g", {"t": {0: 2}}, metadata=character * (fitting + 1))
    assert refused == {("t", 0): Errors.OFFSET_METADATA_TOO_LARGE}
    assert context.fetch("g") == {("t", 0): (1, character * fitting)}


def value_of(members: int, *, subscription: int = 0, assignment: int = 0, client_id: str = "") -> GroupMetadataValue:
    """Returns the record of a group with that many bytes per member."""
    return GroupMetadataValue(
        protocol_type="consumer",
        generation=1,
        protocol="range",
        leader="m0",
        members=[
            GroupMetadataValue.MemberMetadata(
                member_id=f"m{number}",
                client_id=client_id,
                client_host="/127.0.0.1",
                subscription=bytes(subscription),
                assignment=bytes(assignment),
            )
            for number in range(members)
        ],
    )


def batch_bytes(group_id: str, value: GroupMetadataValue) -> int:
    batch = PackedBatch(5, 0)
    batch.add(encode_records([SERDE.serialize(group_metadata_record(group_id, value))]), 1)
    return len(batch.encode())


@pytest.mark.parametrize(
    "value",
    [
        value_of(1, subscription=MAX_BATCH_BYTES),
        value_of(1, assignment=MAX_BATCH_BYTES),
        value_of(1, subscription=MAX_BATCH_BYTES // 2, assignment=MAX_BATCH_BYTES // 2),
        value_of(2_200, subscription=500),
        value_of(34, client_id="😀" * 8_000),
    ],
    ids=["subscription", "assignment", "both", "many members", "wide characters"],
)
def test_a_group_that_fits_into_no_batch_is_too_large(value: GroupMetadataValue) -> None:
    assert batch_bytes("g", value) > MAX_BATCH_BYTES
    assert is_too_large("g", value)


@pytest.mark.parametrize("instance_id", [None, "", "i-ü"])
@pytest.mark.parametrize(("protocol", "leader"), [(None, None), ("range", "m0"), ("😀", "")])
def test_the_size_of_a_group_is_computed_exactly(
    instance_id: str | None, protocol: str | None, leader: str | None
) -> None:
    for members in (0, 1, 3):
        value = value_of(members, subscription=7, assignment=5, client_id="ü")
        value.protocol_type, value.protocol, value.leader = "consumer", protocol, leader
        for member in value.members:
            member.group_instance_id = instance_id
        assert size_bytes(value) == len(value.encode(GROUP_METADATA_VALUE_VERSION))


@pytest.mark.parametrize("group_id", ["g", "g" * 4_096, "ü" * 16_000], ids=["short", "long", "of an older log"])
def test_the_largest_group_leaves_a_kilobyte_for_the_rest_of_its_batch(group_id: str) -> None:
    smallest, largest = 0, MAX_BATCH_BYTES
    while largest - smallest > 1:
        middle = (smallest + largest) // 2
        is_larger = is_too_large(group_id, value_of(1, assignment=middle))
        smallest, largest = (smallest, middle) if is_larger else (middle, largest)
    value = value_of(1, assignment=smallest)
    assert MAX_BATCH_BYTES - len(value.encode(3)) - len(group_id.encode()) == 1_024
    assert batch_bytes(group_id, value) <= MAX_BATCH_BYTES
