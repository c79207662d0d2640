# SPDX-License-Identifier: Apache-2.0
"""Which generations a client may commit with, for groups of every kind. 0 is a generation, -1 is none."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from kcoord_protocol.errors import Errors, KafkaError
from tests.unit.group.classic_members import ClassicConsumer, settle
from tests.unit.group.group_context import GroupContext

MEMBER = "the member's id"
OK, UNKNOWN, ILLEGAL = Errors.NONE, Errors.UNKNOWN_MEMBER_ID, Errors.ILLEGAL_GENERATION
NOT_FOUND, STALE = Errors.GROUP_ID_NOT_FOUND, Errors.STALE_MEMBER_EPOCH


def no_group(context: GroupContext) -> str:
    return ""


def offsets_alone(context: GroupContext) -> str:
    context.commit("g", {"t": {0: 1}})
    return ""


def classic_group(context: GroupContext) -> str:
    """Creates a classic group at generation 1; returns its member."""
    member = ClassicConsumer(context, "g", "a", ["t"])
    settle(context, [member], {"t": 1})
    return member.member_id


def consumer_group(context: GroupContext) -> str:
    """Creates a consumer group at epoch 2; returns its member."""
    context.join("g", "member-a", ["t"])
    return "member-a"


def error_of(commit: Callable[[], dict[tuple[str, int], int]]) -> Errors:
    try:
        return Errors(commit()["t", 0])
    except KafkaError as error:
        return error.error


@pytest.mark.parametrize(
    ("group", "member", "api_version", "expected"),
    [
        (no_group, "", 9, {-2: OK, -1: OK, 0: NOT_FOUND, 1: NOT_FOUND}),
        (no_group, "", 8, {-1: OK, 0: ILLEGAL, 1: ILLEGAL}),
        (offsets_alone, "", 8, {-1: OK, 0: UNKNOWN, 1: UNKNOWN}),
        (classic_group, "", 8, {-1: UNKNOWN, 0: UNKNOWN, 1: UNKNOWN}),
        (classic_group, MEMBER, 8, {-1: ILLEGAL, 0: ILLEGAL, 1: OK, 2: ILLEGAL}),
        (consumer_group, "", 9, {-1: UNKNOWN, 0: UNKNOWN, 2: UNKNOWN}),
        (consumer_group, MEMBER, 9, {-1: STALE, 0: STALE, 1: STALE, 2: OK, 3: STALE}),
        (consumer_group, MEMBER, 8, {2: Errors.UNSUPPORTED_VERSION}),
    ],
)
def test_commits_by_generation(
    group: Callable[[GroupContext], str], member: str, api_version: int, expected: dict[int, Errors]
) -> None:
    errors = {}
    for generation in expected:
        context = GroupContext({"t": 1}, {"group.initial.rebalance.delay.ms": "0"})
        made = group(context)
        member_id = made if member == MEMBER else member

        def commit() -> dict[tuple[str, int], int]:
            return context.commit("g", {"t": {0: 5}}, member=member_id, epoch=generation, api_version=api_version)  # noqa: B023

        errors[generation] = error_of(commit)
    assert errors == expected
