# SPDX-License-Identifier: Apache-2.0
"""`kcoord upstream import|export|verify` between another kcoord, which is the upstream, and kcoord in front of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
from confluent_kafka import Consumer

from kcoord.client import AdminClient, OffsetAndMetadata, TopicPartition
from kcoord.testing import KcoordBroker, start_broker
from tests.integration.upstream.gateways import Gateways
from tests.support.command_line import CommandLine, rows
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

TOPIC = "orders"
NUMBERS = count()


@pytest.fixture(scope="module")
def upstream() -> Iterator[KcoordBroker]:
    with start_broker() as broker:
        broker.create_topic(TOPIC, 3)
        yield broker


@pytest.fixture(scope="module")
def gateways(upstream: KcoordBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    gateways = Gateways(upstream.bootstrap_servers, tmp_path_factory)
    yield gateways
    gateways.stop()


@pytest.fixture
def gateway(gateways: Gateways) -> KcoordProcess:
    """A gateway that imports by command only, so that a test sees what a command does."""
    return gateways.last(kcoord_upstream_import="off")


@pytest.fixture
def command(gateway: KcoordProcess) -> CommandLine:
    return CommandLine(gateway.address)


@pytest.fixture
def group(upstream: KcoordBroker) -> str:
    """A group that the upstream has offsets of."""
    group_id = f"group{next(NUMBERS)}"
    upstream.commit(group_id, {TOPIC: {0: 10, 1: 20}})
    return group_id


def results(command: CommandLine, action: str, *arguments: str, code: int = 0) -> dict[str, tuple[int, str]]:
    """Runs an import or export. Returns offsets and result by group."""
    output = command.run("upstream", action, *arguments, "--json")
    assert output.code == code, output
    return {row["group"]: (row["offsets"], row["result"]) for row in json.loads(output.out)}


def differences(command: CommandLine, *arguments: str) -> list[tuple[str, int, str | None, str | None]]:
    """Runs verify. Returns the differences: group, partition, and both sides."""
    output = command.run("upstream", "verify", *arguments, "--json")
    differing = json.loads(output.out)["differences"]
    assert output.code == (1 if differing else 0), output
    return [(row["group"], row["partition"], row["upstream"], row["kcoord"]) for row in differing]


def commit(address: str, group_id: str, *offsets: OffsetAndMetadata) -> None:
    """Commits offsets of the first partitions of the topic."""

    async def run() -> None:
        async with AdminClient(bootstrap_servers=address) as admin:
            places = {TopicPartition(TOPIC, partition): offset for partition, offset in enumerate(offsets)}
            (await admin.alter_consumer_group_offsets(group_id, places)).all()

    asyncio.run(run())


def delete(address: str, group_id: str) -> None:
    async def run() -> None:
        async with AdminClient(bootstrap_servers=address) as admin:
            (await admin.delete_consumer_groups([group_id])).all()

    asyncio.run(run())


def committed(address: str, group_id: str) -> dict[int, OffsetAndMetadata]:
    async def run() -> dict[int, OffsetAndMetadata]:
        async with AdminClient(bootstrap_servers=address) as admin:
            offsets = (await admin.list_consumer_group_offsets([group_id]))[group_id]
        return {partition.partition: offset for partition, offset in offsets.items() if offset is not None}

    return asyncio.run(run())


@contextmanager
def member(address: str, group_id: str) -> Iterator[None]:
    """Keeps a member with an assignment in a group."""
    consumer = Consumer({"bootstrap.servers": address, "group.id": group_id, "enable.auto.commit": False})
    consumer.subscribe([TOPIC])

    def is_assigned() -> bool:
        consumer.poll(0.1)
        return bool(consumer.assignment())

    try:
        wait_until(is_assigned, "the member has partitions", 20)
        yield
    finally:
        consumer.close()


def test_import_of_a_group(command: CommandLine, group: str) -> None:
    both = ("--group", group)
    assert differences(command, *both) == [(group, 0, "10", None), (group, 1, "20", None)]
    assert results(command, "import", *both, "--dry-run") == {group: (2, "would be imported")}
    assert len(differences(command, *both)) == 2
    assert results(command, "import", *both) == {group: (2, "imported")}
    assert differences(command, *both) == []
    assert results(command, "import", *both) == {group: (0, "is here already")}
    assert results(command, "import", "--group", "nobody") == {"nobody": (0, "nothing to import")}


def test_import_of_all_groups(command: CommandLine, upstream: KcoordBroker) -> None:
    group_ids = [f"all{number}" for number in range(120)]
    for group_id in group_ids:
        upstream.commit(group_id, {TOPIC: {0: 1}})
    imported = results(command, "import")
    assert {group_id: imported[group_id] for group_id in group_ids} == dict.fromkeys(group_ids, (1, "imported"))
    assert differences(command) == []


def test_a_group_that_was_deleted_is_imported_only_again(
    command: CommandLine, gateway: KcoordProcess, group: str
) -> None:
    results(command, "import", "--group", group)
    delete(gateway.address, group)
    refused = (0, "was here before; --again imports it")
    assert results(command, "import", "--group", group) == {group: refused}
    assert results(command, "import", "--group", group, "--again", "--dry-run") == {group: (2, "would be imported")}
    assert results(command, "import", "--group", group, "--again") == {group: (2, "imported")}
    assert differences(command, "--group", group) == []


def test_groups_with_members_are_left_alone(
    command: CommandLine, upstream: KcoordBroker, gateway: KcoordProcess, group: str
) -> None:
    with member(upstream.bootstrap_servers, group):
        ((offsets, text),) = results(command, "import", "--group", group, code=1).values()
        assert offsets == 0
        assert text.startswith(f"NON_EMPTY_GROUP: group {group} is in use in the upstream: it is ")
    results(command, "import", "--group", group)
    with member(gateway.address, group):
        ((offsets, text),) = results(command, "export", "--group", group, code=1).values()
        assert text == "has 1 members here (Stable); stop them first"
    with member(upstream.bootstrap_servers, group):
        ((offsets, text),) = results(command, "export", "--group", group, code=1).values()
        assert text == "has 1 members in the upstream (Stable); stop them first"


def test_export_of_a_group(command: CommandLine, upstream: KcoordBroker, gateway: KcoordProcess, group: str) -> None:
    results(command, "import", "--group", group)
    moved = (OffsetAndMetadata(30, "here", 4), OffsetAndMetadata(20), OffsetAndMetadata(5))
    commit(gateway.address, group, *moved)
    assert differences(command, "--group", group) == [(group, 0, "10", "30"), (group, 2, None, "5")]
    assert results(command, "export", "--group", group, "--dry-run") == {group: (3, "would be exported")}
    assert len(differences(command, "--group", group)) == 2
    assert results(command, "export", "--group", group) == {group: (3, "exported")}
    assert differences(command, "--group", group) == []
    assert committed(upstream.bootstrap_servers, group) == dict(enumerate(moved))


def test_export_does_not_move_a_group_back(
    command: CommandLine, upstream: KcoordBroker, gateway: KcoordProcess, group: str
) -> None:
    results(command, "import", "--group", group)
    commit(gateway.address, group, OffsetAndMetadata(9), OffsetAndMetadata(30))
    later = "offsets in the upstream are later (orders-0: 10 > 9); --overwrite exports it all the same"
    assert results(command, "export", "--group", group, code=1) == {group: (0, later)}
    assert committed(upstream.bootstrap_servers, group) == {0: OffsetAndMetadata(10), 1: OffsetAndMetadata(20)}
    assert results(command, "export", "--group", group, "--overwrite") == {group: (2, "exported")}
    assert committed(upstream.bootstrap_servers, group) == {0: OffsetAndMetadata(9), 1: OffsetAndMetadata(30)}


def test_export_of_unknown_groups_imports_nothing(gateways: Gateways, group: str) -> None:
    """Neither does verify, also with imports on demand."""
    command = CommandLine(gateways.last().address)
    assert results(command, "export", "--group", group, code=1) == {group: (0, "kcoord does not have the group")}
    assert differences(command, "--group", group) == [(group, 0, "10", None), (group, 1, "20", None)]
    assert differences(command, "--group", group) == [(group, 0, "10", None), (group, 1, "20", None)]


def test_an_offset_that_the_upstream_refuses_is_named(
    command: CommandLine, upstream: KcoordBroker, gateway: KcoordProcess
) -> None:
    group_id = f"group{next(NUMBERS)}"
    commit(gateway.address, group_id, OffsetAndMetadata(1), OffsetAndMetadata(2))
    with upstream.inject_fault("OffsetCommit", group=group_id, error="OFFSET_METADATA_TOO_LARGE"):
        ((offsets, text),) = results(command, "export", "--group", group_id, code=1).values()
        assert offsets == 0
        assert text.startswith("2 of 2 offsets failed; orders-0: OFFSET_METADATA_TOO_LARGE: ")


def test_tables(command: CommandLine, group: str) -> None:
    shown = command.run("upstream", "verify", "--group", group)
    assert shown.code == 1
    assert rows(shown.out) == [
        {"GROUP": group, "TOPIC": TOPIC, "PARTITION": "0", "UPSTREAM": "10", "KCOORD": "-"},
        {"GROUP": group, "TOPIC": TOPIC, "PARTITION": "1", "UPSTREAM": "20", "KCOORD": "-"},
    ]
    assert shown.out.splitlines()[-1] == "groups with equal offsets: 0; offsets that differ: 2"
    shown = command.succeed("upstream", "import", "--group", group)
    assert shown.out.split() == ["GROUP", "OFFSETS", "RESULT", group, "2", "imported"]


def test_a_difference_may_be_in_epoch_or_metadata_only(
    command: CommandLine, gateway: KcoordProcess, group: str
) -> None:
    results(command, "import", "--group", group)
    commit(gateway.address, group, OffsetAndMetadata(10, "x", 2))
    assert differences(command, "--group", group) == [
        (group, 0, "10 (leader epoch -1, metadata '')", "10 (leader epoch 2, metadata 'x')")
    ]


def test_a_broker_that_is_no_gateway_is_named(upstream: KcoordBroker) -> None:
    output = CommandLine(upstream.bootstrap_servers).run("upstream", "verify")
    assert output.code == 1
    assert output.err == (
        f"kcoord upstream verify: {upstream.bootstrap_servers} is not kcoord in front of an existing cluster\n"
    )


def test_the_upstream_may_ask_for_a_login(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    module = "org.apache.kafka.common.security.plain.PlainLoginModule required"
    login = {
        "kcoord.upstream.security.protocol": "SASL_PLAINTEXT",
        "kcoord.upstream.sasl.mechanism": "PLAIN",
        "kcoord.upstream.sasl.jaas.config": f'{module} username="gateway" password="secret";',
    }
    with start_broker(users={"gateway": "secret"}) as upstream:
        upstream.create_topic(TOPIC)
        upstream.commit("g", {TOPIC: {0: 10}})
        gateways = Gateways(upstream.bootstrap_servers, tmp_path_factory)
        try:
            gateway = gateways.start(**{key.replace(".", "_"): value for key, value in login.items()})
            command, config = CommandLine(gateway.address), tmp_path / "command.properties"
            config.write_text("".join(f"{key}={value}\n" for key, value in login.items()))
            assert results(command, "import", "--command-config", str(config)) == {"g": (1, "imported")}
            assert command.run("upstream", "verify", "--timeout", "500").code == 1
        finally:
            gateways.stop()
