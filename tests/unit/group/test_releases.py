# SPDX-License-Identifier: Apache-2.0
"""What groups do differently under `kcoord.release=4.3` and `4.4`, with the facts observed in Kafka 4.3.1 and 4.4.0."""

from __future__ import annotations

import pytest

from kcoord.coordinator.group.records import EPOCH_REASON_TAG
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ConsumerGroupMetadataValue, JoinGroupRequest
from tests.unit.group.group_context import GroupContext

A, B = "member-a", "member-b"
INTERVAL = "group.consumer.assignment.interval.ms"


def context_of(release: str, configs: dict[str, str] | None = None) -> GroupContext:
    return GroupContext({"t3": 3, "t6": 6}, {"kcoord.release": release, **(configs or {})})


def epochs(context: GroupContext, group: str = "g") -> tuple[int, int, str]:
    described = context.describe(group)
    return described.group_epoch, described.assignment_epoch, described.assignor_name


@pytest.mark.parametrize(
    ("names", "regex", "assignor", "in_4_3", "in_4_4"),
    [
        ([], None, None, 1, 1),
        ([], None, "uniform", 1, 1),
        ([], None, "range", 1, 2),
        (None, "none", None, 1, 1),
        (None, "none", "range", 1, 2),
        (["t6"], None, None, 2, 2),
        (["t6"], None, "range", 2, 2),
        (["missing"], None, "range", 2, 2),
    ],
)
def test_epoch_of_the_first_member(
    names: list[str] | None, regex: str | None, assignor: str | None, in_4_3: int, in_4_4: int
) -> None:
    for release, epoch in (("4.3", in_4_3), ("4.4", in_4_4)):
        context = context_of(release)
        joined = context.join("g", A, names, regex=regex, assignor=assignor)
        assert joined.member_epoch == epoch, release
        assert epochs(context)[:2] == (epoch, epoch), release


CLASS_NAMES = ",".join(
    f"org.apache.kafka.coordinator.group.assignor.{name}" for name in ("UniformAssignor", "RangeAssignor")
)


@pytest.mark.parametrize("assignors", ["uniform,range", CLASS_NAMES], ids=["names", "class names"])
@pytest.mark.parametrize(("release", "changed"), [("4.3", (2, 2, "range")), ("4.4", (3, 3, "range"))])
def test_a_member_that_changes_the_assignor(release: str, changed: tuple[int, int, str], assignors: str) -> None:
    context = context_of(release, {"group.consumer.assignors": assignors})
    context.join("g", A, ["t6"], assignor=None)
    epoch = context.heartbeat("g", A, 2, assignor="range").member_epoch
    assert (epoch, epochs(context)) == (changed[0], changed)
    assert context.heartbeat("g", A, epoch, assignor="range").member_epoch == epoch
    assert context.heartbeat("g", A, epoch).member_epoch == epoch


def test_the_record_says_that_the_assignor_was_the_reason() -> None:
    context = context_of("4.4")
    context.join("g", A, ["t6"], assignor=None)
    context.heartbeat("g", A, 2, assignor="range")
    (value,) = [record.value for record in context.records if isinstance(record.value, ConsumerGroupMetadataValue)]
    assert dict(value.unknown_tagged_fields)[EPOCH_REASON_TAG] == b"assignor"


def test_a_change_that_leaves_the_preferred_assignor_makes_no_epoch() -> None:
    context = context_of("4.4")
    context.join("g", A, ["t6"], assignor="range")
    context.join("g", B, ["t6"], assignor="range")
    context.heartbeat("g", A, 2, owned={"t6": [0, 1, 2]})
    before = epochs(context)
    context.heartbeat("g", B, 3, assignor="uniform")
    assert epochs(context) == (before[0] + 1, before[1] + 1, "uniform")  # one vote each: the broker's order decides
    context.heartbeat("g", A, 3, assignor="uniform")
    assert epochs(context) == (before[0] + 1, before[1] + 1, "uniform")


@pytest.mark.parametrize(("release", "epoch"), [("4.3", 2), ("4.4", 3)])
def test_a_static_member_that_returns_with_another_assignor(release: str, epoch: int) -> None:
    context = context_of(release)
    context.join("g", A, ["t6"], assignor="range", instance="i")
    context.heartbeat("g", A, -2, instance="i")
    assert context.join("g", B, ["t6"], assignor=None, instance="i").member_epoch == 2
    context.heartbeat("g", B, -2, instance="i")
    assert context.join("g", A, ["t6"], assignor="uniform", instance="i").member_epoch == epoch


@pytest.mark.parametrize(("release", "last"), [("4.3", (3, 2)), ("4.4", (3, 3))])
@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "is silent"])
def test_assignment_epoch_after_the_last_member(release: str, last: tuple[int, int], leaves: bool) -> None:
    context = context_of(release)
    context.join("g", A, ["t6"], assignor=None)
    if leaves:
        context.heartbeat("g", A, -1)
    else:
        context.sleep(45_000)
    assert (context.describe("g").group_state, epochs(context)[:2]) == ("Empty", last)
    context.restart()
    assert epochs(context)[:2] == last
    assert context.join("g", B, ["t6"], assignor=None).member_epoch == 4


def test_a_member_that_joins_after_the_last_one_does_not_wait_for_the_interval() -> None:
    """The assignment epoch of an empty group is not the time of an assignment."""
    context = context_of("4.4", {INTERVAL: "1000"})
    context.join("g", A, ["t6"], assignor=None)
    context.heartbeat("g", A, -1)
    joined = context.join("g", B, ["t6"], assignor=None)
    assert (joined.member_epoch, context.assigned(joined)) == (4, {"t6": [0, 1, 2, 3, 4, 5]})


@pytest.mark.parametrize(
    ("release", "error"), [("4.3", Errors.UNKNOWN_SERVER_ERROR), ("4.4", Errors.INCONSISTENT_GROUP_PROTOCOL)]
)
def test_classic_member_with_metadata_that_cannot_be_read(release: str, error: Errors) -> None:
    context = context_of(release)
    context.join("g", A, ["t6"])
    protocol = JoinGroupRequest.JoinGroupRequestProtocol(name="range", metadata=b"\x00")
    request = JoinGroupRequest(
        group_id="g",
        member_id="classic",
        protocol_type="consumer",
        protocols=[protocol],
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
    )
    with pytest.raises(KafkaError) as refused:
        context.run(lambda ctx: context.shard.join_group(ctx, request), 9)
    assert refused.value.error is error


def test_assignments_can_be_kept_out_of_the_background() -> None:
    """`consumer.assignor.offload.enable` of 4.4, for the broker and for one group."""
    slow = {"kcoord.assignor.inline.ms": "0"}
    for configs, group_configs, tasks in (
        ({}, {}, 1),
        ({"group.consumer.assignor.offload.enable": "false"}, {}, 0),
        ({}, {"consumer.assignor.offload.enable": "false"}, 0),
        ({"group.consumer.assignor.offload.enable": "false"}, {"consumer.assignor.offload.enable": "true"}, 1),
    ):
        context = context_of("4.4", slow | configs)
        if group_configs:
            context.group_configs["g"] = group_configs
            context.update_metadata(context.topics)
        context.join("g", A, ["t6"])
        context.join("g", B, ["t6"])
        assert len(context.tasks) == tasks, (configs, group_configs)
