# SPDX-License-Identifier: Apache-2.0
"""Racks with real clients: two workers in two racks, the assignor `uniform-rack`, and `kcoord groups simulate`.

The brokers place partitions by turns: the even ones of a topic are in rack a, and the odd ones in rack b.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import confluent_kafka.admin
import pytest

from kcoord.client import AdminClient, ConsumerGroupDescription, TopicPartition
from tests.integration.client.helpers import Events, Member, eventually
from tests.support.command_line import CommandLine, rows
from tests.support.confluent import PolledConsumer, create_topic, partitions_of, wait_for_split
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until

ODD, EVEN = [1, 3, 5], [0, 2, 4]
PINNED = """
from kcoord.assignors import ServerAssignor

class Pinned(ServerAssignor):
    name = "pinned"

    def assign(self, members, topics):
        print("this must not be in the JSON")
        last = max(members, key=lambda member_id: members[member_id].instance_id)
        return {last: {name: range(topic.partition_count) for name, topic in topics.items()}}

class Lazy(Pinned):
    name = "lazy"

    def assign(self, members, topics):
        return {}
"""


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KcoordProcess]:
    settings = {
        "kcoord.worker.ports": "0,0",
        "kcoord.worker.racks": "a,b",
        "group.consumer.assignors": "uniform,range,uniform-rack",
    }
    process = KcoordProcess(tmp_path_factory.mktemp("kcoord"), {**FAST, **settings}).start()
    yield process
    assert process.stop() == 0, process.log


@pytest.fixture
def kcoord(broker: KcoordProcess) -> CommandLine:
    return CommandLine(broker.address)


def static_member(
    broker: KcoordProcess, group_id: str, topic: str, instance_id: str, **settings: str
) -> PolledConsumer:
    """Returns a static member; settings have underscores for dots."""
    dotted = {key.replace("_", "."): value for key, value in settings.items()}
    return PolledConsumer(broker.address, group_id, [topic], instance_id=instance_id, settings=dotted)


def described(broker: KcoordProcess, group_id: str) -> ConsumerGroupDescription:
    async def describe() -> ConsumerGroupDescription:
        async with AdminClient(bootstrap_servers=broker.address) as admin:
            return (await admin.describe_consumer_groups([group_id]))[group_id]

    return asyncio.run(describe())


def settled(broker: KcoordProcess, group_id: str, epoch: int = 0) -> tuple[int, dict[str, list[int]]]:
    """Waits until the group is stable at this epoch or a later one.

    Returns its epoch, and the partitions that each member has, by instance id.
    """
    owned: dict[str, list[int]] = {}
    epochs: list[int] = []

    def is_settled() -> bool:
        group = described(broker, group_id)
        epochs.append(group.group_epoch or 0)
        owned.update(
            (str(member.group_instance_id), sorted(n for _, n in member.assignment)) for member in group.members
        )
        has_left = any((member.member_epoch or 0) < 0 for member in group.members)
        return group.state == "Stable" and not has_left and epochs[-1] >= epoch

    wait_until(is_settled, f"the group is stable at epoch {epoch} or later", 20)
    return epochs[-1], owned


def simulated(kcoord: CommandLine, group_id: str, assignor: str) -> Any:
    return json.loads(kcoord.succeed("groups", "simulate", "--group", group_id, "--assignor", assignor, "--json").out)


def test_a_member_that_returns_in_another_rack_gets_partitions_of_that_rack(broker: KcoordProcess, name: str) -> None:
    def returns(instance_id: str, rack: str) -> PolledConsumer:
        settings = {"client_rack": rack, "group_remote_assignor": "uniform-rack"}
        return static_member(broker, name, name, instance_id, **settings)

    create_topic(broker.address, name, 6)
    with closing(returns("one", "b")) as first, closing(returns("two", "a")) as second:
        wait_for_split([first, second], partitions_of(name, 6))
        epoch, owned = settled(broker, name)
        assert owned == {"one": ODD, "two": EVEN}

        # In the same rack the member has its partitions again, without a new epoch.
        first.close()
        with closing(returns("one", "b")) as first_again:
            assert settled(broker, name) == (epoch, owned)
            # Of two members in rack a only one can have partitions of the rack, so nothing moves.
            first_again.close()
            with closing(returns("one", "a")):
                epoch, owned = settled(broker, name, epoch + 1)
                assert owned == {"one": ODD, "two": EVEN}
                # Now all partitions can match, so all move.
                second.close()
                with closing(returns("two", "b")):
                    _, owned = settled(broker, name, epoch + 1)
                    assert owned == {"one": EVEN, "two": ODD}


def test_members_of_kcoord_client_get_partitions_of_their_racks(broker: KcoordProcess, name: str) -> None:
    create_topic(broker.address, name, 6)

    async def run() -> None:
        owners: dict[TopicPartition, Events] = {}
        members = [
            await Member(broker.address, name, owners, client_rack=rack, group_remote_assignor="uniform-rack").start(
                name
            )
            for rack in ("b", "a")
        ]
        expected = [{TopicPartition(name, number) for number in numbers} for numbers in (ODD, EVEN)]
        await eventually(
            lambda: [set(member.consumer.assignment) for member in members] == expected, "all partitions match"
        )
        for member in members:
            await member.stop()

    asyncio.run(run())


def test_the_simulated_target_is_the_one_that_the_broker_computes(
    broker: KcoordProcess, kcoord: CommandLine, name: str
) -> None:
    create_topic(broker.address, f"{name}-1", 3)
    create_topic(broker.address, f"{name}-2", 3)
    regex = f"^{name}-[0-9]$"
    with (
        closing(static_member(broker, name, regex, "one", client_rack="b")) as first,
        closing(static_member(broker, name, regex, "two", client_rack="a")) as second,
    ):
        wait_for_split([first, second], partitions_of(f"{name}-1", 3) | partitions_of(f"{name}-2", 3))
        epoch, _ = settled(broker, name)
        simulation = simulated(kcoord, name, "uniform-rack")
        present, new = simulation["targets"]
        assert (present["assignor"], new["assignor"]) == ("uniform", "uniform-rack")
        table = kcoord.succeed("groups", "simulate", "--group", name, "--assignor", "uniform-rack").out

        second.close()
        with closing(static_member(broker, name, regex, "two", client_rack="a", group_remote_assignor="uniform-rack")):
            settled(broker, name, epoch + 1)
            group = described(broker, name)
    # What the simulation says is compared with the broker's target, and its figures are counted again.
    target_of = {str(member.group_instance_id): member.target_assignment or frozenset() for member in group.members}
    shown = shown_targets(simulation, "new_target_assignment")
    assert shown == target_of
    before = shown_targets(simulation, "target_assignment")
    moved = {(topic, n) for topic, ns in simulation["moved"].items() for n in ns}
    assert moved == set().union(*(before[instance] - target_of[instance] for instance in before))
    leaders = leaders_of(broker, [f"{name}-1", f"{name}-2"])
    rack_of = {"one": 2, "two": 1}
    for target, owned in ((present, before), (new, target_of)):
        loads = [len(partitions) for partitions in owned.values()]
        assert (target["min_load"], target["max_load"], target["spread"]) == (3, 3, 0)
        assert (min(loads), max(loads), target["partitions"]) == (3, 3, 6)
        assert target["rack_matches"] == sum(
            leaders[partition] == rack_of[instance] for instance, owned_by in owned.items() for partition in owned_by
        )
    assert new["rack_matches"] == 6
    assert f"\n{len(moved)} of 6 partitions would move" in table
    (row,) = (row for row in rows(table, "TARGET") if row["TARGET"] == "new")
    assert row == {
        "TARGET": "new",
        "ASSIGNOR": "uniform-rack",
        "#PARTITIONS": "6",
        "MIN-LOAD": "3",
        "MAX-LOAD": "3",
        "SPREAD": "0",
        "RACK-MATCHES": "6",
    }


def shown_targets(simulation: Any, key: str) -> dict[str, set[tuple[str, int]]]:
    return {
        member["group_instance_id"]: {(topic, number) for topic, numbers in member[key].items() for number in numbers}
        for member in simulation["members"]
    }


def leaders_of(broker: KcoordProcess, topics: list[str]) -> dict[tuple[str, int], int]:
    metadata = confluent_kafka.admin.AdminClient({"bootstrap.servers": broker.address}).list_topics(timeout=10)
    return {(topic, number): p.leader for topic in topics for number, p in metadata.topics[topic].partitions.items()}


def test_an_assignor_of_ones_own_is_simulated_without_installing_it(
    broker: KcoordProcess, kcoord: CommandLine, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "assignors_to_simulate"
    (tmp_path / f"{module}.py").write_text(PINNED)
    monkeypatch.syspath_prepend(tmp_path)
    create_topic(broker.address, name, 6)
    with (
        closing(static_member(broker, name, name, "one")) as first,
        closing(static_member(broker, name, name, "two")) as second,
    ):
        wait_for_split([first, second], partitions_of(name, 6))
        simulation = simulated(kcoord, name, f"{module}:Pinned")
        assert [member["new_target_assignment"] for member in simulation["members"]] == [{}, {name: [0, 1, 2, 3, 4, 5]}]
        assert len(simulation["moved"][name]) == 3
        assert simulation["targets"][1] == {
            "target": "new",
            "assignor": "pinned",
            "partitions": 6,
            "min_load": 0,
            "max_load": 6,
            "spread": 6,
            "rack_matches": 0,
        }
        for assignor, reason in (
            (f"{module}:Lazy", f"partition {name}-0 has no owner"),
            (
                f"{module}:Absent",
                "AttributeError: module 'assignors_to_simulate' has no attribute 'Absent'",
            ),
        ):
            failed = kcoord.run("groups", "simulate", "--group", name, "--assignor", assignor)
            assert (failed.code, failed.out, failed.err) == (1, "", f"kcoord groups simulate: {assignor}: {reason}\n")


def test_a_simulation_needs_an_assignor_and_a_consumer_group_with_members(
    broker: KcoordProcess, kcoord: CommandLine, name: str
) -> None:
    def error_of(group_id: str, assignor: str) -> str:
        failed = kcoord.run("groups", "simulate", "--group", group_id, "--assignor", assignor)
        assert (failed.code, failed.out) == (1, "")
        return failed.err.removeprefix("kcoord groups simulate: ").removesuffix("\n")

    create_topic(broker.address, name, 1)
    assert error_of("absent", "range") == "GROUP_ID_NOT_FOUND: Group absent not found."
    assert error_of("absent", "sticky").startswith("sticky is not uniform, range, uniform-rack, an entry point")
    with PolledConsumer(broker.address, name, [name], classic="range") as old:
        wait_until(lambda: old.assigned, "the member has the partition", 20)
        assert error_of(name, "range").startswith(f"group {name} uses the classic protocol")
    with PolledConsumer(broker.address, f"{name}-left", [name]) as dynamic:
        wait_until(lambda: dynamic.assigned, "the member has the partition", 20)
        # A class name of Kafka names its built-in assignor.
        kafka_name = "org.apache.kafka.coordinator.group.assignor.RangeAssignor"
        assert simulated(kcoord, f"{name}-left", kafka_name)["targets"][1]["assignor"] == "range"
    assert error_of(f"{name}-left", "range") == f"group {name}-left has no members"
