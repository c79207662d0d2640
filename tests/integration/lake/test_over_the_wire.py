# SPDX-License-Identifier: Apache-2.0
"""The jobs of the lake over the wire: the tables of the folders, samples of the brokers, and errors before any work."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from kcoord.cli.lake import main
from kcoord.client.admin.client import AdminClient
from kcoord.client.types import OffsetAndMetadata, TopicPartition
from kcoord.pipeline.lake.jobs import SILVER
from kcoord.pipeline.lake.samples import Topics, take_sample
from kcoord.pipeline.lake.storage import Lake
from kcoord.pipeline.lake.tables import TABLES
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.uuid import uuid_to_string
from tests.integration.clients.test_dump_log import write_everything
from tests.support.authorizing_process import authorizing_process
from tests.support.kcoord_process import KcoordProcess
from tests.support.offsets_sample import described_offsets, unpack_sample
from tests.support.waiting import wait_until

Rows = list[str]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KcoordProcess]:
    """A broker with an authorizer, whose second listener is for a user without rights."""
    folder = tmp_path_factory.mktemp("broker")
    running = authorizing_process(
        folder,
        listeners="PLAINTEXT://127.0.0.1:0,ALICE://127.0.0.1:0",
        listener_security_protocol_map="PLAINTEXT:PLAINTEXT,ALICE:PLAINTEXT",
        kcoord_listener_principals="ALICE=User:alice",
        offsets_retention_minutes="77",
        kcoord_audit_log=str(folder / "audit.log"),
    ).start()
    write_everything(running.address, "orders")
    yield running
    running.stop()


def rows(lake: Lake, name: str) -> Rows:
    """Returns the rows of a table as sorted text, without the numbers of the batches."""
    columns = [f"`{column.name}`" for column in TABLES[name].columns if column.name != "batch"]
    return sorted(str(row.asDict(recursive=True)) for row in lake.read(name).select(columns).collect())


def test_a_report_over_the_wire_has_the_tables_of_the_folders(
    spark: SparkSession, broker: KcoordProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wire, folders = (Lake(spark, str(tmp_path / name)) for name in ("wire", "folders"))
    config = tmp_path / "client.properties"
    config.write_text(f"bootstrap.servers={broker.address}\nclient.id=auditor\n")
    page = tmp_path / "report.html"
    report = ["report", "--lake", wire.uri, "--command-config", str(config), "--output", str(page)]
    assert main(report) == 0
    progress = capsys.readouterr().err
    assert "batch 0: " in progress and " MB), " in progress and "behind" not in progress
    assert main(["ingest", "--lake", folders.uri, "--log", str(broker.data), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert done["records"] == done["total"] > 100 and done["bytes"] > 10_000
    assert (done["partitions_behind"], done["bytes_behind"], done["seconds_left"]) == (0, 0, 0)
    for name in ("records", *SILVER):
        # The samples name topics whose ids alone are in assignments.
        if name != "assignments":
            assert rows(wire, name) == rows(folders, name), name
    assert wire.read("assignments").count() == folders.read("assignments").count() > 0
    assert wire.read("assignments").where("topic IS NULL").count() == 0
    assert wire.stored_settings()["retention_ms"] == str(77 * 60_000), "the brokers told it"
    assert wire.stored_settings()["expiry_policy"] == "kip211"
    ends = {(row["topic"], row["partition"]) for row in wire.read("ends").collect()}
    assert {("orders", 0), ("orders", 1)} <= ends
    brokers = [(row["broker_id"], row["port"], row["is_controller"]) for row in wire.read("brokers").collect()]
    assert brokers == [(1, broker.port, True)]
    described = {row["group"]: row["coordinator"] for row in wire.read("descriptions").collect()}
    assert {"orders-848", "orders-classic", "orders-tx"} <= described.keys()
    assert "orders-848" in page.read_text()
    check_a_second_cluster(wire, tmp_path, capsys)


def test_losses_name_who_deleted_reset_or_was_denied(
    broker: KcoordProcess, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = TopicPartition("orders", 0)

    async def lose_offsets() -> None:
        async with AdminClient(bootstrap_servers=broker.address, client_id="tool") as admin:
            for offset in (9, 4):
                (await admin.alter_consumer_group_offsets("lost", {place: OffsetAndMetadata(offset)})).all()
            (await admin.delete_consumer_group_offsets("lost", [place])).all()
        async with AdminClient(bootstrap_servers=f"127.0.0.1:{broker.ports[1]}") as alice:
            with pytest.raises(KafkaError):
                (await alice.delete_consumer_groups(["lost"])).all()

    asyncio.run(lose_offsets())
    audit = str(broker.log_file.with_name("audit.log"))
    wait_until(lambda: "User:alice" in Path(audit).read_text(), "the denial is in the audit log")
    options = ["--lake", str(tmp_path / "lake"), "--bootstrap-server", broker.address, "--audit", audit, "--json"]
    assert main(["losses", *options, "--limit", "1000"]) == 0
    answer = json.loads(capsys.readouterr().out)
    names = ("action", "lost_offset", "new_offset", "principal", "client_id", "request")
    losses = [tuple(row[name] for name in names) for row in answer["losses"] if row["group"] == "lost"]
    assert sorted(losses, key=str) == [
        ("offset-delete", 4, None, "User:ANONYMOUS", "tool", "OffsetDelete"),
        ("reset", 9, 4, "User:ANONYMOUS", "tool", "OffsetCommit"),
        ("reset", None, 9, "User:ANONYMOUS", "tool", "OffsetCommit"),
    ]
    denied = [row for row in answer["denials"] if row["resource"] == "lost"]
    assert {(row["principal"], row["resource_type"]) for row in denied} == {("User:alice", "GROUP")}


def test_a_topic_that_the_client_may_not_see_is_not_taken_for_a_deleted_one(broker: KcoordProcess) -> None:
    no_topic = uuid_to_string(bytes(15) + b"\x01")

    async def sample(address: str, seen: Iterable[str] = ()) -> Topics:
        async with AdminClient(bootstrap_servers=address) as admin:
            topics = (await take_sample(admin, seen=seen, with_groups=False)).topics
            assert topics is not None
            return topics

    listed = asyncio.run(sample(broker.address)).listed
    assert {"orders", "__consumer_offsets"} <= {*listed.values()}
    hidden = asyncio.run(sample(f"127.0.0.1:{broker.ports[1]}", [*listed, no_topic]))
    assert hidden.listed == {}
    assert hidden.unlisted == {
        **dict.fromkeys(listed, Errors.TOPIC_AUTHORIZATION_FAILED),
        no_topic: Errors.UNKNOWN_TOPIC_ID,
    }


def check_a_second_cluster(lake: Lake, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Copies the log of another cluster into the lake, and asks for both and for one."""
    log = unpack_sample(folder / "sample")
    options = ["--lake", lake.uri, "--retention-minutes", "1"]
    assert main(["ingest", *options, "--log", log, "--cluster", "sample", "--option", "logPartitions=3"]) == 0
    capsys.readouterr()
    both, chosen = (_current(capsys, *options, *more) for more in ([], ["--cluster", "sample"]))
    assert {cluster for cluster, _ in both} == {lake.cluster, "sample"}
    assert {group for cluster, group in both if cluster == "sample"} == {group for _, group in chosen}
    assert {group for _, group in chosen} == {group for group, _, _ in described_offsets(3)}
    assert main(["report", *options, "--output", str(folder / "both.html")]) == 1
    assert f"has the clusters {', '.join(sorted([str(lake.cluster), 'sample']))}" in capsys.readouterr().err


def _current(capsys: pytest.CaptureFixture[str], *options: str) -> set[tuple[str, str]]:
    """Returns cluster and group of the current offsets."""
    assert main(["current", *options, "--json", "--limit", "1000"]) == 0
    return {(row["cluster"], row["group"]) for row in json.loads(capsys.readouterr().out)["current_offsets"]}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--bootstrap-server", "127.0.0.1:1", "--timeout", "300"], "no connection to 127.0.0.1:1"),
        (["--bootstrap-server", "{address}", "--topic", "nothing"], "topic: nothing does not exist"),
        (
            ["--bootstrap-server", "{alice}"],
            "the client needs an ACL that allows READ on the topic __consumer_offsets",
        ),
        (["--log", "/nowhere"], "there is no folder __consumer_offsets-N at /nowhere"),
        (["--bootstrap-server", "{address}", "--option", "groop=x"], "unknown option groop"),
    ],
)
def test_an_error_is_one_line_and_leaves_no_lake(
    broker: KcoordProcess, tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    alice = f"127.0.0.1:{broker.ports[1]}"
    given = [argument.format(address=broker.address, alice=alice) for argument in arguments]
    for job in ("ingest", "status"):
        assert main([job, "--lake", str(tmp_path / "lake"), *given]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("kcoord lake: ") and message in line
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ingest"], "ingest needs --log, --bootstrap-server or --command-config"),
        (["ends"], "ends needs --bootstrap-server or --command-config"),
        (
            ["ingest", "--log", "/data", "--bootstrap-server", "127.0.0.1:1"],
            "--log: not allowed with --bootstrap-server",
        ),
    ],
)
def test_a_wrong_command_line_ends_with_exit_code_2(
    tmp_path: Path, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--lake", str(tmp_path / "lake")])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err
