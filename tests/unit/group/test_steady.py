# SPDX-License-Identifier: Apache-2.0
"""Steady heartbeats, checked by Hypothesis: a repeated response equals the response of a full run.

Random steps change a group. After every step each remembered heartbeat that still counts as steady is run in full. It
must give the same response, no records, no tasks, and no effect except its session timer.
"""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.coordinator.group.steady import SteadyHeartbeat
from kcoord.runtime.result import CoordinatorResult, OperationContext, Schedule
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import ConsumerGroupHeartbeatRequest, HeartbeatRequest, JoinGroupResponse
from tests.unit.group.classic_members import ClassicConsumer
from tests.unit.group.group_context import GroupContext, Waiting

MEMBERS = st.sampled_from(["a", "b"])
MOSTLY_NONE = [None, None, None]
TOPICS = st.lists(st.sampled_from(["t3", "t6", "later"]), unique=True)
CONFIGS = {"group.initial.rebalance.delay.ms": "0", "group.consumer.min.session.timeout.ms": "1000"}


@dataclass
class Remembered:
    shard: GroupCoordinatorShard
    steady: SteadyHeartbeat
    request: ConsumerGroupHeartbeatRequest | HeartbeatRequest
    client: str
    answer: bytes


class GroupLife(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.context = GroupContext({"t3": 3, "t6": 6}, CONFIGS)
        self.epochs: dict[str, int] = {}
        self.classic: dict[str, ClassicConsumer] = {}
        self.remembered: list[Remembered] = []

    def _run(self, request: ConsumerGroupHeartbeatRequest | HeartbeatRequest, client: str) -> CoordinatorResult[object]:
        context = OperationContext(self.context.now_ms, 1, client_id=client, client_host="/127.0.0.1")
        shard = self.context.shard
        if isinstance(request, HeartbeatRequest):
            return shard.heartbeat(context, request)  # type: ignore[return-value]
        return shard.consumer_group_heartbeat(context, request)  # type: ignore[return-value]

    def _heartbeat(self, request: ConsumerGroupHeartbeatRequest | HeartbeatRequest, client: str) -> int:
        """Runs one heartbeat, and remembers it if the shard calls it steady, as a connection does."""
        try:
            records: list[object] = []

            def operation(context: OperationContext) -> CoordinatorResult[object]:
                result = self._run(request, client)
                records.extend(result.records)
                return result

            response = self.context.run(operation)
        except KafkaError:
            return -1
        steady = self.context.shard.steady_heartbeat(request.group_id, request.member_id)
        if not records and steady is not None and not response.error_code:  # type: ignore[attr-defined]
            answer = response.encode(1)  # type: ignore[attr-defined]
            self.remembered.append(Remembered(self.context.shard, steady, request, client, answer))
        return getattr(response, "member_epoch", 0)

    @rule(
        member=MEMBERS,
        topics=TOPICS,
        instance=st.sampled_from([*MOSTLY_NONE, "i1"]),
        regex=st.sampled_from([*MOSTLY_NONE, "t.*"]),
    )
    def join(self, member: str, topics: list[str], instance: str | None, regex: str | None) -> None:
        request = ConsumerGroupHeartbeatRequest(
            group_id="g",
            member_id=member,
            member_epoch=0,
            instance_id=instance,
            rebalance_timeout_ms=5000,
            subscribed_topic_names=topics,
            subscribed_topic_regex=regex,
            topic_partitions=[],
        )
        self.epochs[member] = self._heartbeat(request, member)

    @rule(member=MEMBERS, acknowledge=st.booleans())
    def heartbeat(self, member: str, acknowledge: bool) -> None:
        self._turn(member, acknowledge)

    def _turn(self, member: str, acknowledge: bool) -> None:
        owned = None
        if acknowledge:
            described = {m.member_id: m for m in self.context.describe("g").members}.get(member)
            owned = [
                ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id=t.topic_id, partitions=t.partitions)
                for t in (described.assignment.topic_partitions if described is not None else [])
            ]
        epoch = self.epochs.get(member, 0)
        request = ConsumerGroupHeartbeatRequest(
            group_id="g", member_id=member, member_epoch=epoch, topic_partitions=owned
        )
        if epoch > 0:
            self.epochs[member] = self._heartbeat(request, member)

    @rule(rounds=st.integers(2, 4))
    def work(self, rounds: int) -> None:
        """Lets all members acknowledge and repeat, so that most members become steady."""
        for turn in range(rounds * 2):
            for member in ("a", "b"):
                self._turn(member, acknowledge=turn % 2 == 0)

    @rule(member=MEMBERS, epoch=st.sampled_from([-1, -2]), instance=st.sampled_from([None, "i1"]))
    def leave(self, member: str, epoch: int, instance: str | None) -> None:
        request = ConsumerGroupHeartbeatRequest(
            group_id="g", member_id=member, member_epoch=epoch, instance_id=instance
        )
        self._heartbeat(request, member)

    @rule(name=st.sampled_from(["x", "y"]), topics=TOPICS)
    def classic_turn(self, name: str, topics: list[str]) -> None:
        """Lets a classic member join, sync and send a heartbeat, up to the first step that waits or fails."""
        member = self.classic.setdefault(name, ClassicConsumer(self.context, "g", name, topics))
        try:
            reply = member.join()
            if isinstance(reply, Waiting):
                self.context.sleep(0)
            answer = reply.answer if isinstance(reply, Waiting) else reply
            if isinstance(answer, JoinGroupResponse) and answer.error_code == 0:
                member.on_joined(answer)
                member.sync({member.member_id: {"t3": [0]}} if member.leads else None)
        except KafkaError:
            member.member_id = ""
        request = HeartbeatRequest(group_id="g", generation_id=member.generation, member_id=member.member_id)
        self._heartbeat(request, f"c-{name}")

    @rule(name=st.sampled_from(["x", "y"]))
    def classic_leave(self, name: str) -> None:
        if name in self.classic:
            self.classic.pop(name).leave()

    @rule(milliseconds=st.sampled_from([0, 100, 6_000, 50_000]))
    def sleep(self, milliseconds: int) -> None:
        self.context.sleep(milliseconds)

    @rule(topics=st.dictionaries(st.sampled_from(["t3", "t6", "later"]), st.integers(1, 4), min_size=1))
    def change_topics(self, topics: dict[str, int]) -> None:
        self.context.update_metadata(topics)

    @rule(timeout_ms=st.integers(1000, 60_000))
    def change_configs(self, timeout_ms: int) -> None:
        self.context.group_configs["g"] = {"consumer.session.timeout.ms": str(timeout_ms)}
        self.context.update_metadata(self.context.topics)

    @rule()
    def run_tasks(self) -> None:
        self.context.run_tasks()

    @rule()
    def delete(self) -> None:
        self.context.run(lambda context: self.context.shard.delete_groups(context, ["g"]))

    @rule()
    def restart(self) -> None:
        """Restarts the shard; the connection keeps the heartbeats of the shard before."""
        self.context.restart()

    @invariant()
    def a_repeated_response_equals_that_of_a_full_run(self) -> None:
        shard = self.context.shard
        self.remembered = [
            entry for entry in self.remembered if entry.shard is shard and entry.steady.is_current(shard.image_epoch)
        ]
        for entry in self.remembered:
            result = self._run(entry.request, entry.client)
            assert result.response.encode(1) == entry.answer  # type: ignore[attr-defined]
            assert (result.records, result.tasks, result.completions) == ([], [], [])
            deadline_ms = self.context.now_ms + entry.steady.timeout_ms
            assert result.timers == [Schedule(entry.steady.timer, deadline_ms)]


TestGroupLife = GroupLife.TestCase
TestGroupLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_the_life_reaches_steady_members_of_both_protocols() -> None:
    """The property above would prove nothing if no heartbeat were ever remembered."""
    life = GroupLife()
    life.join("a", ["t3"], None, None)
    life.heartbeat("a", False)
    life.heartbeat("a", False)
    assert life.remembered
    life.leave("a", -1, None)
    life.delete()
    life.a_repeated_response_equals_that_of_a_full_run()
    assert not life.remembered
    life.classic_turn("x", ["t3"])
    assert life.remembered
