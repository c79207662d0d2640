# SPDX-License-Identifier: Apache-2.0
"""The table of KIP-211 row by row: both group types, both policies, with and without a restart.

Each test also compares the time with the forecast of `kcoord groups expiry`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from kcoord.logtools.expiry import ExpiryRow, GroupHistory, forecast
from tests.unit.group.classic_members import ClassicConsumer, settle
from tests.unit.group.group_context import GroupContext

MINUTE_MS = 60_000
CHECK_MS = MINUTE_MS // 2
RETENTION = 10
"""offsets.retention.minutes"""
EMPTY_AFTER = 20
"""The minute in which members leave. An offset that ages from its commit would have expired before."""
OBSERVED = 60
NEVER = None
CONFIG = {
    "offsets.retention.minutes": str(RETENTION),
    "offsets.retention.check.interval.ms": str(CHECK_MS),
    "group.initial.rebalance.delay.ms": "0",
    "group.max.session.timeout.ms": str(10**9),
    "group.consumer.max.session.timeout.ms": str(10**9),
    "group.consumer.session.timeout.ms": str(10**9),
}
BOTH = ("kip211", "kafka")


@dataclass(frozen=True)
class Case:
    """One row. Minutes count from the commit.

    `members` are the topics to which the member subscribes, None without a member; `leave` is when it leaves.
    """

    name: str
    group_type: str
    policies: tuple[str, ...]
    expires: float | None
    because: str
    members: tuple[str, ...] | None = None
    leave: int | None = None
    retention_time: int | None = None
    commit_time: int | None = None
    commit_again: float | None = None
    override: int | None = None
    protocol_type: str = "consumer"
    rebalancing: bool = False


READS, READS_OTHER = ("t3",), ("t6",)
E, R = EMPTY_AFTER, RETENTION


def rows() -> list[Case]:
    cases = [
        Case("simple consumer", "none", BOTH, R, "never had members"),
        Case("simple consumer, v1 time", "none", BOTH, R - 5, "never had members", commit_time=-5),
        Case("simple consumer, v1 time ahead", "none", BOTH, R + 30, "never had members", commit_time=30),
        Case("simple consumer, short v2-v4 retention", "none", BOTH, 2, "retention of the commit", retention_time=2),
        Case("simple consumer, long v2-v4 retention", "none", BOTH, 60, "retention of the commit", retention_time=60),
        Case("simple consumer, override", "none", BOTH, 3, "never had members", override=3),
        Case("simple consumer, commits again", "none", BOTH, 5 + R, "never had members", commit_again=5),
        Case("connect, live", "classic", BOTH, NEVER, "topics unknown", members=READS, protocol_type="connect"),
        Case("connect, empty", "classic", BOTH, E + R, "group empty", READS, E, protocol_type="connect"),
        Case("between generations", "classic", BOTH, NEVER, "between generations", READS_OTHER, rebalancing=True),
        Case("empty, policy kafka", "consumer", ("kafka",), max(E, R), "policy kafka", READS, E),
        Case("empty, commits again, policy kafka", "consumer", ("kafka",), E + 0.25 + R, "policy kafka", READS, E,
             commit_again=E + 0.25),
    ]  # fmt: skip
    for kind in ("classic", "consumer"):
        since_empty = BOTH if kind == "classic" else ("kip211",)
        own = "retention of the commit"
        cases += [
            Case("live, subscribed", kind, BOTH, NEVER, "subscribed", READS),
            Case("live, subscribed, short retention", kind, BOTH, NEVER, "subscribed", READS, retention_time=2),
            Case("live, subscribed, old v1 time", kind, BOTH, NEVER, "subscribed", READS, commit_time=-500),
            Case("live, subscribed, override", kind, BOTH, NEVER, "subscribed", READS, override=3),
            Case("live, not subscribed", kind, BOTH, R, "not subscribed", READS_OTHER),
            Case("live, not subscribed, short retention", kind, BOTH, 2, own, READS_OTHER, retention_time=2),
            Case("live, not subscribed, long retention", kind, BOTH, 60, own, READS_OTHER, retention_time=60),
            Case("live, not subscribed, v1 time", kind, BOTH, R - 5, "not subscribed", READS_OTHER, commit_time=-5),
            Case("live, not subscribed, override", kind, BOTH, 30, "not subscribed", READS_OTHER, override=30),
            Case("empty", kind, since_empty, E + R, "group empty", READS, E),
            Case("empty, override", kind, since_empty, E + 30, "group empty", READS, E, override=30),
            Case("empty, commits again", kind, since_empty, E + 5 + R, "group empty", READS, E, commit_again=E + 5),
            Case("empty, short retention", kind, BOTH, E, own, READS, E, retention_time=2),
            Case("empty, long retention", kind, BOTH, 60, own, READS, E, retention_time=60),
        ]
    return cases


CASES = [
    pytest.param(case, policy, restarts, id=f"{case.group_type}-{case.name}-{policy}{'-restart' * restarts}")
    for case in rows()
    for policy in case.policies
    for restarts in (False, True)
]


class Scene:
    """A group as the case describes it; minutes count from the commit."""

    def __init__(self, case: Case, policy: str) -> None:
        self.case = case
        self.context = GroupContext({"t3": 3, "t6": 6}, CONFIG | {"kcoord.offsets.expiration.policy": policy})
        self.context.now_ms = 1000 * MINUTE_MS
        self.context.restart()
        if case.override is not None:
            self.context.group_configs["g"] = {"kcoord.offsets.retention.minutes": str(case.override)}
            self.context.update_metadata(self.context.topics)
        self.begin_ms = self.context.now_ms
        self._classic: ClassicConsumer | None = None
        self._commit()
        if case.members is not None:
            self._join(case.members)

    def _commit(self) -> None:
        case = self.case
        if case.commit_time is not None:
            time_ms = self.context.now_ms + case.commit_time * MINUTE_MS
            self.context.commit("g", {"t3": {0: 7}}, api_version=1, commit_timestamp=time_ms)
        elif case.retention_time is not None:
            retention_ms = case.retention_time * MINUTE_MS
            self.context.commit("g", {"t3": {0: 7}}, api_version=4, retention_time_ms=retention_ms)
        else:
            self.context.commit("g", {"t3": {0: 7}})

    def _join(self, topics: tuple[str, ...]) -> None:
        if self.case.group_type == "consumer":
            self.context.join("g", "m", topics)
            return
        self._classic = member = ClassicConsumer(self.context, "g", "m", topics)
        member.session_timeout_ms = member.rebalance_timeout_ms = 10**9
        member.protocol_type = self.case.protocol_type
        settle(self.context, [member], {topic: self.context.topics[topic] for topic in topics})
        if self.case.rebalancing:
            member.topics = ["t6", "t3"]
            member.join()

    def go_to(self, minute: float) -> None:
        self.context.sleep(round(self.begin_ms + minute * MINUTE_MS) - self.context.now_ms)

    def act(self, until: float) -> None:
        """Runs the case up to that minute."""
        case = self.case
        if case.leave is not None and self._minute < case.leave <= until:
            self.go_to(case.leave)
            if self._classic is not None:
                self._classic.leave()
            else:
                self.context.heartbeat("g", "m", -1)
        if case.commit_again is not None and self._minute < case.commit_again <= until:
            self.go_to(case.commit_again)
            self.context.commit("g", {"t3": {0: 8}})
        self.go_to(until)

    @property
    def _minute(self) -> float:
        return (self.context.now_ms - self.begin_ms) / MINUTE_MS

    def is_there(self) -> bool:
        return ("t3", 0) in self.context.fetch("g")

    def foretold(self) -> ExpiryRow:
        history = GroupHistory()
        for record in self.context.log:
            history.replay(record)
        return next(forecast(history, self.context.config, self.context.image, "g"))


@pytest.mark.parametrize(("case", "policy", "restarts"), CASES)
def test_an_offset_expires_when_the_table_says(case: Case, policy: str, restarts: bool) -> None:
    scene = Scene(case, policy)
    begun = max(case.leave or 0, case.commit_again or 0)
    scene.act(begun)
    # Rebalances are soft state: after a restart the group is in its last complete generation.
    if restarts and not case.rebalancing:
        scene.context.restart()
    if not case.rebalancing:
        foretold = scene.foretold()
        assert foretold.because == case.because
        if case.leave is None or case.retention_time is None or case.retention_time > case.leave:
            expected_ms = None if case.expires is None else scene.begin_ms + case.expires * MINUTE_MS
            if case.because == "policy kafka" and case.commit_again is None:
                # The offset was due while the members protected it.
                expected_ms = scene.begin_ms + R * MINUTE_MS
            assert foretold.expires_ms == expected_ms
    if case.expires is None:
        scene.act(OBSERVED)
        assert scene.is_there()
        return
    scene.act(max(case.expires - 1 / MINUTE_MS, begun))
    assert scene.is_there()
    scene.act(case.expires + CHECK_MS / MINUTE_MS)
    assert not scene.is_there()


def test_the_group_is_deleted_with_its_last_offset() -> None:
    scene = Scene(Case("", "none", BOTH, R, ""), "kip211")
    scene.act(5)
    scene.context.commit("g", {"t6": {1: 1}})
    scene.act(R + 1)
    assert list(scene.context.fetch("g")) == [("t6", 1)]
    (row, group) = forecast_of(scene.context)
    assert (group.topic, group.because, group.expires_ms) == (None, "with its last offset", row.expires_ms)
    scene.act(5 + R + 1)
    assert forecast_of(scene.context) == []
    assert scene.context.rebuilt().hard_state() == GroupContext({"t3": 3, "t6": 6}, CONFIG).shard.hard_state()


def forecast_of(context: GroupContext) -> list[ExpiryRow]:
    history = GroupHistory()
    for record in context.log:
        history.replay(record)
    return list(forecast(history, context.config, context.image))


def test_a_regular_expression_that_is_not_resolved_protects_everything() -> None:
    scene = Scene(Case("", "none", BOTH, R, ""), "kip211")
    scene.context.heartbeat("g", "m", 0, names=[], regex="t3.*", owned={}, rebalance_timeout_ms=5000)
    scene.act(2 * R)
    assert scene.is_there()
    assert forecast_of(scene.context)[0].because == "topics unknown"
    scene.context.run_tasks()
    assert forecast_of(scene.context)[0].because == "subscribed"


def test_the_next_check_deletes_an_empty_group_without_offsets() -> None:
    context = GroupContext({"t3": 3}, CONFIG)
    context.restart()
    context.join("g", "m", ["t3"])
    assert forecast_of(context) == []
    context.heartbeat("g", "m", -1)
    assert [(row.topic, row.because) for row in forecast_of(context)] == [(None, "without offsets")]
    context.sleep(CHECK_MS)
    assert forecast_of(context) == []


def test_a_group_of_kafka_which_does_not_record_when_it_became_empty() -> None:
    context = GroupContext({"t3": 3}, CONFIG)
    context.commit("g", {"t3": {0: 1}})
    context.join("g", "m", ["t3"])
    context.heartbeat("g", "m", -1)
    for record in context.log:
        if record.value is not None:
            record.value.unknown_tagged_fields = ()
    (row,) = forecast_of(context)
    assert (row.expires_ms, row.because) == (None, "group empty, unknown since when")
    context.restart()
    context.sleep(CHECK_MS)
    noted_ms = context.now_ms
    for _ in range(RETENTION - 1):
        context.sleep(MINUTE_MS)
        context.restart()
    assert [row.expires_ms for row in forecast_of(context)] == [noted_ms + RETENTION * MINUTE_MS] * 2
    assert context.fetch("g") == {("t3", 0): (1, "")}
    context.sleep(MINUTE_MS + CHECK_MS)
    assert context.fetch("g") == {}


def test_the_offsets_of_a_deleted_topic_are_deleted() -> None:
    context = GroupContext({"t3": 3, "t6": 6}, CONFIG)
    context.restart()
    context.commit("g", {"t3": {0: 1}, "t6": {0: 2}})
    context.join("h", "m", ["t3"])
    context.commit("h", {"t3": {0: 1}}, member="m", epoch=2)
    context.update_metadata({"t6": 6})
    assert context.fetch("g") == {("t6", 0): (2, "")}
    assert context.fetch("h") == {}
    context.restart()
    assert context.fetch("g") == {("t6", 0): (2, "")}
