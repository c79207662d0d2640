# SPDX-License-Identifier: Apache-2.0
"""`kcoord consumer-groups`: its output is that of Kafka's own tool, and its changes take effect."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kcoord_protocol.messages import JoinGroupRequest, JoinGroupResponse
from tests.integration.wire import WireClient
from tests.support.command_line import CommandLine, rows, titles
from tests.support.confluent import PolledConsumer, committed, create_topic, produce
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

COMMAND = "consumer-groups"


@pytest.fixture
def kcoord(broker: KcoordProcess) -> CommandLine:
    return CommandLine(broker.address)


@pytest.fixture
def idle(broker: KcoordProcess, name: str) -> str:
    """A group without members that has read 10 records of each of the two partitions of a topic of the same name."""
    create_topic(broker.address, name, 2)
    produce(broker.address, name, 2, 10)
    with PolledConsumer(broker.address, name, [name], commit_each=True) as member:
        member.wait_for(20)
    return name


@pytest.fixture
def live(broker: KcoordProcess, idle: str) -> Iterator[str]:
    """A group with a member that has read all these records."""
    with PolledConsumer(broker.address, f"{idle}-live", [idle], commit_each=True) as member:
        member.wait_for(20)
        yield f"{idle}-live"


def offsets(broker: KcoordProcess, group_id: str, topic: str) -> list[int]:
    offset_of = committed(broker.address, group_id, [(topic, 0), (topic, 1)])
    return [offset_of[topic, 0], offset_of[topic, 1]]


@pytest.mark.java
def test_tables_are_those_of_kafka(kcoord: CommandLine, idle: str, live: str) -> None:
    jars = KafkaJars()

    def kafka(*arguments: str) -> str:
        return jars.tool(COMMAND, "--bootstrap-server", kcoord.address, *arguments)

    assert rows(kcoord.succeed(COMMAND, "--list", "--state", "--type").out) == rows(
        kafka("--list", "--state", "--type")
    )
    groups = ["--describe", "--group", live, "--group", idle]
    for detail in (["--verbose"], ["--members", "--verbose"]):
        ours, theirs = kcoord.succeed(COMMAND, *groups, *detail).out, kafka(*groups, *detail)
        assert titles(ours, "GROUP") == titles(theirs, "GROUP")
        assert rows(ours) == rows(theirs)
    ours, theirs = kcoord.succeed(COMMAND, *groups, "--state", "--verbose").out, kafka(*groups, "--state", "--verbose")
    assert titles(ours, "GROUP") == [*titles(theirs, "GROUP"), "GROUP-CREATION-TIME"]
    assert [{key: row[key] for key in row if key != "GROUP-CREATION-TIME"} for row in rows(ours)] == rows(theirs)


@pytest.mark.java
def test_members_of_both_protocols_are_shown_as_by_kafka(broker: KcoordProcess, kcoord: CommandLine, idle: str) -> None:
    with (
        PolledConsumer(broker.address, idle, [idle], instance_id="static-a", classic="cooperative-sticky") as old,
        PolledConsumer(broker.address, idle, [idle], instance_id="static-b") as new,
    ):
        wait_until(lambda: len(old.assigned) == len(new.assigned) == 1, "both members have a partition", 30)
        for detail, last in ([["--verbose"], "UPGRADED"], [[], "#PARTITIONS"]):
            members = ["--describe", "--group", idle, "--members", *detail]
            ours = kcoord.succeed(COMMAND, *members).out
            theirs = KafkaJars().tool(COMMAND, "--bootstrap-server", kcoord.address, *members)
            assert titles(ours, "GROUP") == titles(theirs, "GROUP")
            assert titles(ours, "GROUP")[2] == "GROUP-INSTANCE-ID"
            assert titles(ours, "GROUP")[-1] == last
            assert rows(ours) == rows(theirs)
        members_shown = kcoord.succeed(COMMAND, "--describe", "--group", idle, "--members", "--json").json
    assert {(row["group_instance_id"], row["upgraded"]) for row in members_shown} == {
        ("static-a", False),
        ("static-b", True),
    }


@pytest.mark.java
def test_changes_are_those_of_kafka(kcoord: CommandLine, idle: str, tmp_path: Path) -> None:
    jars = KafkaJars()
    reset = ["--reset-offsets", "--group", idle, "--topic", idle]
    file = tmp_path / "plan.csv"
    file.write_text(kcoord.succeed(COMMAND, *reset, "--shift-by", "-4", "--export").out)
    command = [COMMAND, "--bootstrap-server", kcoord.address]
    theirs = jars.tool(*command, "--reset-offsets", "--group", idle, "--from-file", str(file), "--execute")
    again = kcoord.succeed(COMMAND, *reset, "--to-current", "--dry-run").out
    assert rows(again) == rows(theirs)
    theirs = jars.tool(*command, "--delete-offsets", "--group", idle, "--topic", f"{idle}:1", "--topic", "absent")
    ours = kcoord.run(COMMAND, "--delete-offsets", "--group", idle, "--topic", f"{idle}:1", "--topic", "absent")
    assert titles(ours.out, "TOPIC") == titles(theirs, "TOPIC") == ["TOPIC", "PARTITION", "STATUS"]
    assert ours.out.splitlines()[-1].split() == theirs.splitlines()[-1].split() == [idle, "1", "Successful"]
    assert ours.code == 1


def test_lists(kcoord: CommandLine, idle: str, live: str) -> None:
    assert {idle, live} <= set(kcoord.succeed(COMMAND, "--list").out.split())
    stable = kcoord.succeed(COMMAND, "--list", "--state", "stable").out
    assert {"GROUP": live, "STATE": "Stable"} in rows(stable)
    assert idle not in [row["GROUP"] for row in rows(stable)]
    # A group of an earlier test may have become classic, since its members have left one by one.
    generic = [row["GROUP"] for row in rows(kcoord.succeed(COMMAND, "--list", "--type", "generic").out)]
    assert idle not in generic and live not in generic
    listed = {row["group"]: row for row in kcoord.succeed(COMMAND, "--list", "--json").json}
    assert listed[idle] == {"group": idle, "type": "Consumer", "state": "Empty"}


def test_lag(broker: KcoordProcess, kcoord: CommandLine, idle: str) -> None:
    produce(broker.address, idle, 1, 3)
    described = kcoord.succeed(COMMAND, "--describe", "--group", idle)
    assert "no active members" in described.err
    first, second = rows(described.out)
    assert (first["CURRENT-OFFSET"], first["LOG-END-OFFSET"], first["LAG"]) == ("10", "13", "3")
    assert (second["LAG"], second["CONSUMER-ID"]) == ("0", "-")
    assert [row["lag"] for row in kcoord.succeed(COMMAND, "--describe", "--group", idle, "--json").json] == [3, 0]


def test_creation_time(kcoord: CommandLine, idle: str) -> None:
    """The creation time of a group is that of KIP-1327."""
    (row,) = rows(kcoord.succeed(COMMAND, "--describe", "--group", idle, "--state", "--verbose").out)
    created = datetime.fromisoformat(row["GROUP-CREATION-TIME"])
    assert timedelta(0) <= datetime.now(UTC) - created < timedelta(minutes=5)
    (group,) = kcoord.succeed(COMMAND, "--describe", "--group", idle, "--state", "--json").json
    assert group["group_creation_time_ms"] == round(created.timestamp() * 1000)
    assert rows(kcoord.succeed(COMMAND, "--describe", "--group", idle, "--type").out) == [
        {"GROUP": idle, "TYPE": "Consumer"}
    ]


def test_the_time_of_a_classic_group_is_unknown(broker: KcoordProcess, kcoord: CommandLine, name: str) -> None:
    create_topic(broker.address, name)
    produce(broker.address, name, 1, 1)
    with PolledConsumer(broker.address, name, [name], classic="range") as member:
        member.wait_for(1)
        (row,) = rows(kcoord.succeed(COMMAND, "--describe", "--group", name, "--state", "--verbose").out)
        assert (row["GROUP-CREATION-TIME"], row["GROUP-EPOCH"]) == ("N/A", "-")


def test_a_group_that_does_not_exist(kcoord: CommandLine, idle: str) -> None:
    described = kcoord.run(COMMAND, "--describe", "--group", "absent", "--group", idle)
    assert described.code == 1
    assert "error: absent: GROUP_ID_NOT_FOUND" in described.err
    assert {row["GROUP"] for row in rows(described.out)} == {idle}


def test_reset_is_a_dry_run_by_default(broker: KcoordProcess, kcoord: CommandLine, idle: str) -> None:
    reset = ["--reset-offsets", "--group", idle]
    for mode in ([], ["--dry-run"], ["--export"]):
        kcoord.succeed(COMMAND, *reset, "--all-topics", "--to-earliest", *mode)
    assert offsets(broker, idle, idle) == [10, 10]
    done = kcoord.succeed(COMMAND, *reset, "--topic", f"{idle}:1", "--shift-by", "-3", "--execute", "--json")
    assert done.json == [{"group": idle, "topic": idle, "partition": 1, "current_offset": 10, "new_offset": 7}]
    kcoord.succeed(COMMAND, *reset, "--topic", f"{idle}:0", "--to-offset", "1000", "--execute")
    assert offsets(broker, idle, idle) == [10, 7]
    kcoord.succeed(COMMAND, *reset, "--all-topics", "--by-duration", "PT1H", "--execute")
    assert offsets(broker, idle, idle) == [0, 0]
    kcoord.succeed(COMMAND, *reset, "--all-topics", "--to-datetime", "2100-01-01T00:00:00.000", "--execute")
    assert offsets(broker, idle, idle) == [10, 10]


def test_a_plan_of_groups_from_a_file(broker: KcoordProcess, kcoord: CommandLine, idle: str, tmp_path: Path) -> None:
    """The second group is created by its first offsets."""
    groups = ["--reset-offsets", "--group", idle, "--group", f"{idle}-2"]
    plan = kcoord.succeed(COMMAND, *groups, "--topic", idle, "--to-earliest", "--export").out
    file = tmp_path / "plan.csv"
    file.write_text(plan.replace(",0\n", ",4\n"))
    kcoord.succeed(COMMAND, *groups, "--from-file", str(file), "--execute")
    assert offsets(broker, idle, idle) == offsets(broker, f"{idle}-2", idle) == [4, 4]


def test_an_active_group_keeps_its_offsets(broker: KcoordProcess, kcoord: CommandLine, idle: str, live: str) -> None:
    reset = kcoord.run(COMMAND, "--reset-offsets", "--group", live, "--all-topics", "--to-earliest", "--execute")
    assert (reset.code, reset.out) == (1, "")
    assert "its state is Stable" in reset.err
    deleted = kcoord.run(COMMAND, "--delete-offsets", "--group", live, "--topic", f"{idle}:0", "--json")
    assert deleted.code == 1
    assert deleted.json[0]["error"] == "GROUP_SUBSCRIBED_TO_TOPIC"
    assert "NON_EMPTY_GROUP" in kcoord.run(COMMAND, "--delete", "--group", live).err
    assert offsets(broker, live, idle) == [10, 10]


def test_reset_to_the_start_time_of_the_group(broker: KcoordProcess, kcoord: CommandLine, idle: str) -> None:
    """Records that are older than the group are skipped. Newer records and newer partitions are read (KIP-1282)."""
    reset = ["--reset-offsets", "--group", idle, "--topic", idle, "--to-start-time"]
    produce(broker.address, idle, 1, 3)
    kcoord.succeed("topics", "--alter", "--topic", idle, "--partitions", "3")
    kcoord.succeed("produce", idle, "--partition", "2", stdin="new\n")
    dry = kcoord.succeed(COMMAND, *reset, "--json")
    assert [row["new_offset"] for row in dry.json] == [10, 10, 0]
    assert f"{idle}-1 has no record since then: set to its end" in dry.err
    kcoord.succeed(COMMAND, *reset, "--execute")
    assert offsets(broker, idle, idle) == [10, 10]
    described = kcoord.succeed(COMMAND, "--describe", "--group", idle, "--json").json
    assert [row["current_offset"] for row in described] == [10, 10, 0]


def test_a_classic_group_has_no_start_time(broker: KcoordProcess, kcoord: CommandLine, idle: str) -> None:
    classic = f"{idle}-classic"
    with PolledConsumer(broker.address, classic, [idle], classic="range", commit_each=True) as member:
        member.wait_for(20)
    wait_until(
        lambda: "Empty" in kcoord.run(COMMAND, "--describe", "--group", classic, "--state").out, "it is empty", 20
    )
    failed = kcoord.run(COMMAND, "--reset-offsets", "--group", classic, "--all-topics", "--to-start-time")
    assert failed.code == 1
    assert f"error: offsets of '{classic}' cannot be set to its start time" in failed.err
    assert "NEW-OFFSET" not in failed.out


def test_delete_offsets(broker: KcoordProcess, kcoord: CommandLine, idle: str) -> None:
    """The command deletes single offsets of a group (KIP-496)."""
    delete = ["--delete-offsets", "--group", idle, "--topic", f"{idle}:0"]
    assert "Would delete offset 10" in kcoord.succeed(COMMAND, *delete, "--dry-run").out
    assert offsets(broker, idle, idle) == [10, 10]
    assert kcoord.succeed(COMMAND, *delete, "--json").json == [
        {"topic": idle, "partition": 0, "error": None, "message": None}
    ]
    assert offsets(broker, idle, idle) == [-1001, 10]
    nobody = kcoord.run(COMMAND, "--delete-offsets", "--group", "absent", "--topic", f"{idle}:0")
    assert nobody.code == 1
    assert "GROUP_ID_NOT_FOUND" in nobody.out


@pytest.mark.parametrize("protocol", ["consumer", "range", "connect", None])
def test_delete_offsets_dry_run_has_the_errors_of_the_real_run(
    broker: KcoordProcess, kcoord: CommandLine, idle: str, protocol: str | None
) -> None:
    """The groups: without members, of both protocols, of another protocol type, and a group that does not exist."""
    create_topic(broker.address, f"{idle}-unread", 2)
    group = "absent" if protocol is None else idle
    arguments = ["--delete-offsets", "--group", group, "--json"]
    for topic in (f"{idle}:1", f"{idle}:7", f"{idle}-unread", "nope"):
        arguments += ["--topic", topic]
    with ExitStack() as members:
        if protocol == "connect":
            join_as_connect_worker(members.enter_context(WireClient(broker.port)), idle)
        elif protocol is not None:
            classic = None if protocol == "consumer" else protocol
            member = members.enter_context(PolledConsumer(broker.address, idle, [idle], classic=classic))
            wait_until(lambda: len(member.assigned) == 2, "the member has its partitions", 20)
        dry = kcoord.run(COMMAND, *arguments, "--dry-run")
        real = kcoord.run(COMMAND, *arguments)
    assert dry.code == real.code == 1
    foreseen = dry.json
    assert [row.pop("would_delete_offset") for row in foreseen] == [None] * len(foreseen)
    assert foreseen == real.json
    expected = {"consumer": "GROUP_SUBSCRIBED_TO_TOPIC", "range": "GROUP_SUBSCRIBED_TO_TOPIC"} | {
        "connect": "NON_EMPTY_GROUP",
        None: "GROUP_ID_NOT_FOUND",
    }
    assert foreseen[0]["error"] == expected[protocol]


def test_delete_offsets_dry_run_of_a_regular_expression(broker: KcoordProcess, kcoord: CommandLine, idle: str) -> None:
    other = f"x{idle}"
    create_topic(broker.address, other)
    delete = ["--delete-offsets", "--group", idle, "--topic", idle, "--topic", other]
    with PolledConsumer(broker.address, idle, [f"^{idle}.*"]) as member:
        wait_until(lambda: len(member.assigned) == 2, "the member has its partitions", 20)
        dry = kcoord.run(COMMAND, *delete, "--dry-run")
        real = kcoord.run(COMMAND, *delete, "--json")
    assert [row["error"] for row in real.json] == ["GROUP_SUBSCRIBED_TO_TOPIC"] * 2 + [None]
    assert dry.code == real.code == 1
    assert dry.out.count("Error: GROUP_SUBSCRIBED_TO_TOPIC") == 2
    assert dry.out.count("No committed offset") == 1


def join_as_connect_worker(client: WireClient, group_id: str) -> None:
    protocols = [JoinGroupRequest.JoinGroupRequestProtocol(name="p", metadata=b"")]
    request = JoinGroupRequest(
        group_id=group_id,
        session_timeout_ms=10_000,
        rebalance_timeout_ms=10_000,
        protocol_type="connect",
        protocols=protocols,
    )
    assert client.call(request, 3, JoinGroupResponse).error_code == 0


def test_delete(kcoord: CommandLine, idle: str) -> None:
    """Each group succeeds or fails by itself (KIP-229)."""
    deleted = kcoord.run(COMMAND, "--delete", "--group", idle, "--group", "absent")
    assert deleted.code == 1
    assert f"('{idle}') was successful" in deleted.out
    assert "'absent' could not be deleted due to: GROUP_ID_NOT_FOUND" in deleted.err
    assert idle not in kcoord.succeed(COMMAND, "--list").out.split()


def test_no_broker_answers(name: str) -> None:
    failed = CommandLine("127.0.0.1:1").run(COMMAND, "--list", "--timeout", "200")
    assert (failed.code, failed.out) == (1, "")
    assert failed.err.startswith("kcoord consumer-groups: ")
