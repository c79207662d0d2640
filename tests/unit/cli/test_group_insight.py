# SPDX-License-Identifier: Apache-2.0
"""The texts of `kcoord groups explain` and `kcoord groups watch`."""

from __future__ import annotations

from dataclasses import replace

from kcoord.cli.group_insight import InsightSettings, changes, explain
from kcoord.client.admin.model import AssignmentMetadata, ConsumerGroupDescription, MemberDescription
from kcoord.client.assignors import Metadata, OfferedAssignor
from kcoord.client.types import Node, TopicPartition

SETTINGS = InsightSettings(["uniform", "range"], 45_000)


def partitions(*numbers: int) -> frozenset[TopicPartition]:
    return frozenset(TopicPartition("t", number) for number in numbers)


def member(
    name: str, owned: tuple[int, ...], target: tuple[int, ...], epoch: int = 3, instance: str | None = None
) -> MemberDescription:
    return MemberDescription(
        name, instance, "app", "/h", partitions(*owned), None, epoch, partitions(*target), ("t",), None, True
    )


def group(
    *members: MemberDescription, epoch: int = 3, target_epoch: int = 3, **fields: str
) -> ConsumerGroupDescription:
    description = ConsumerGroupDescription(
        "g", "Consumer", "Stable", "consumer", "uniform", list(members), Node(1, "h", 1), epoch, target_epoch, 0
    )
    return replace(description, **fields)  # type: ignore[arg-type]


def explained(description: ConsumerGroupDescription, settings: InsightSettings = SETTINGS) -> list[tuple[str, str]]:
    return [(finding.subject, finding.text) for finding in explain(description, settings)]


def texts_of(before: ConsumerGroupDescription | None, after: ConsumerGroupDescription | None) -> list[tuple[str, str]]:
    return [(finding.subject, finding.text) for finding in changes(before, after)]


def test_a_group_that_has_converged() -> None:
    assert explained(group(member("a", (0,), (0,)))) == [
        ("group", "Consumer group, Stable, 1 member, epoch 3, target assignment of epoch 3"),
        ("created", "1970-01-01T00:00:00.000Z"),
        ("assignor", "uniform: the broker's default, the first of group.consumer.assignors"),
        ("convergence", "complete: no member is waited for"),
    ]


def test_members_that_delay_a_rebalance() -> None:
    statements = explained(group(member("a", (0, 1), (0,)), member("b", (), (1, 2))))
    assert ("convergence", "a (app on /h) has to give up t:1") in statements
    assert ("convergence", "b (app on /h) waits for t:1 from a, gets t:2 with its next heartbeat") in statements


def test_an_outdated_target_and_a_member_with_an_old_epoch() -> None:
    texts = [text for subject, text in explained(group(member("a", (0,), (0,), epoch=2), epoch=4))]
    assert any("out of date" in text for text in texts)
    assert "a (app on /h) gets epoch 3 with its next heartbeat" in texts


def test_an_assignor_that_the_members_have_chosen() -> None:
    texts = dict(explained(group(assignor="range")))
    assert texts["assignor"].startswith("range: most members with group.remote.assignor have it")


def test_an_assignor_that_the_config_names_otherwise() -> None:
    """An assignor of one's own has a name of its own, and Kafka's class names stand for the built-in ones."""
    settings = InsightSettings(["mine:Sticky", "uniform"], 45_000)
    texts = dict(explained(group(assignor="sticky"), settings))
    assert texts["assignor"] == "sticky: the broker's, one of group.consumer.assignors=mine:Sticky,uniform"


def test_static_members() -> None:
    statements = explained(
        group(member("a", (0,), (0,), epoch=-2, instance="i"), member("b", (1,), (1,), instance="j")),
    )
    statics = [text for subject, text in statements if subject == "static member"]
    assert statics == [
        "i left and may return: it keeps t:0 until consumer.session.timeout.ms=45000 has passed",
        "j belongs to b until it sends no heartbeat for consumer.session.timeout.ms=45000",
    ]


def test_a_static_member_of_the_classic_protocol_has_a_session_timeout_of_its_own() -> None:
    static = member("a", (0,), (0,), instance="i")
    for description in (
        group(replace(static, upgraded=False)),
        group(replace(static, upgraded=None), group_type="Classic"),
    ):
        text = dict(explained(description))["static member"]
        assert text == "i belongs to a until it sends no heartbeat for its own session.timeout.ms"


def test_members_of_the_classic_protocol() -> None:
    mixed = explained(group(replace(member("a", (0,), (0,)), upgraded=False)))
    assert ("protocol", "a (app on /h) still uses the classic protocol") in mixed
    classic = explained(group(group_type="Classic", state="PreparingRebalance"))
    assert any(text.startswith("waits for members that have not joined") for _, text in classic)


OFFERED = OfferedAssignor("sticky", 0, 2, 0, Metadata(1))


def offering(name: str, *assignors: OfferedAssignor) -> MemberDescription:
    return replace(member(name, (0,), (0,)), client_assignors=assignors)


class TestClientSideAssignors:
    def test_a_member_that_computes(self) -> None:
        description = replace(
            group(offering("a", OFFERED), offering("b", OFFERED), epoch=4, assignor="sticky"),
            is_assigned_by_member=True,
            computing_member_id="b",
            computing_until_ms=60_000,
        )
        statements = explained(description)
        assert ("assignor", "sticky: runs in the members, all of which offer it, and most prefer it") in statements
        waits = "the target assignment is out of date: b (app on /h) has until 1970-01-01T00:01:00.000Z to compute it"
        assert ("convergence", waits) in statements
        failed = replace(description, failed_computations=2, assignor_error="ValueError: no")
        assert ("convergence", f"{waits}; the assignor sticky failed 2 times: ValueError: no") in explained(failed)

    def test_nobody_computes_yet_or_again(self) -> None:
        description = replace(group(offering("a", OFFERED), epoch=4, assignor="sticky"), is_assigned_by_member=True)
        (text,) = [text for subject, text in explained(description) if subject == "convergence"]
        assert text.endswith("the first able member that sends a heartbeat is asked to compute it")
        failed = replace(description, failed_computations=1, assignor_error="member a: no result in time")
        (text,) = [text for subject, text in explained(failed) if subject == "convergence"]
        assert text.endswith("failed once, and is asked again within a minute: member a: no result in time")

    def test_why_they_are_not_used(self) -> None:
        other = OFFERED._replace(name="lag")
        for members, text in (
            ([offering("a", OFFERED), offering("b")], "not used: b offers none"),
            ([offering("a", OFFERED), offering("b"), offering("c")], "not used: b, c offer none"),
            ([offering("a", OFFERED), offering("b", other)], "not used: there is none that all members offer"),
            (
                [offering("a", OFFERED), offering("b", OFFERED._replace(minimum_version=3, maximum_version=4))],
                "not used: no present member reads the versions of all members of sticky",
            ),
        ):
            assert ("client-side assignors", text) in explained(group(*members))
        assert "client-side assignors" not in dict(explained(group(member("a", (0,), (0,)))))

    def test_an_error_of_an_assignment(self) -> None:
        failing = replace(offering("a", OFFERED), assignment_metadata=AssignmentMetadata(3))
        assert ("assignment error", "a (app on /h) got error 3 with its assignment") in explained(group(failing))
        failing = replace(failing, assignment_metadata=AssignmentMetadata(-2))
        text = "a (app on /h) got error -2 with its assignment: the broker computed it, because all members failed to"
        assert ("assignment error", text) in explained(group(failing))

    def test_a_change_of_metadata_is_a_cause(self) -> None:
        before = group(offering("a", OFFERED))
        after = group(offering("a", OFFERED._replace(metadata=Metadata(1, b"new"))), epoch=4)
        assert texts_of(before, after)[0][1].endswith("because client-side assignors or their metadata changed")


def test_a_join_and_the_partitions_that_it_moves() -> None:
    alone = group(member("a", (0, 1), (0, 1)))
    both = group(member("a", (0, 1), (0,), epoch=3), member("b", (), (1,)), epoch=4, target_epoch=4)
    findings = texts_of(alone, both)
    assert findings[0][1].endswith("because members joined")
    assert findings[1:] == [("joined", "b (app on /h)"), ("member", "a is asked to give up t:1")]
    done = group(member("a", (0,), (0,)), member("b", (1,), (1,)), epoch=4, target_epoch=4)
    assert texts_of(both, done) == [("member", "a gave up t:1"), ("member", "b took t:1")]
    assert texts_of(done, done) == []


def test_other_causes() -> None:
    before = group(member("a", (0,), (0,)), member("b", (1,), (1,)))
    left = texts_of(before, group(member("a", (0,), (0,)), epoch=4))
    assert left[0][1].endswith("because members left")
    assert left[1] == ("left", "b (app on /h)")
    other = replace(member("a", (0,), (0,)), subscribed_topic_names=("u",))
    assert texts_of(before, group(other, member("b", (1,), (1,)), epoch=4))[0][1].endswith(
        "because subscriptions changed"
    )
    assert texts_of(before, replace(before, group_epoch=4))[0][1].endswith("subscribed topics or settings changed")
    assert texts_of(before, replace(before, state="Reconciling"))[0][1].endswith("target assignment of epoch 3")
    assert texts_of(before, replace(before, target_assignment_epoch=4))[0][1].endswith("target assignment was computed")
    assert texts_of(replace(before, group_type="Classic"), before)[0][1].endswith("converted from Classic")


def test_groups_come_and_go() -> None:
    first = texts_of(None, group(member("a", (0,), (0,), epoch=-2, instance="i")))
    assert [subject for subject, _ in first] == ["group", "created", "joined", "member", "member"]
    assert first[-1] == ("member", "a left and may return")
    assert texts_of(group(), None) == [("group", "no longer exists")]
    assert texts_of(None, None) == []
