# SPDX-License-Identifier: Apache-2.0
"""Rows as tables and JSON, and the rows of groups and topics."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import pytest

from kcoord.cli.group_descriptions import MEMBERS_VERBOSE, _print_tables, member_rows, offset_rows, state_row
from kcoord.cli.output import OutputColumn, assignment_text, node_text, print_rows, time_text
from kcoord.cli.session import client_config
from kcoord.cli.topics import topic_json, topic_lines
from kcoord.client.admin.model import (
    AssignmentMetadata,
    ConsumerGroupDescription,
    MemberDescription,
    TopicDescription,
    TopicPartitionInfo,
)
from kcoord.client.assignors import Metadata, OfferedAssignor
from kcoord.client.config import AdminConfig
from kcoord.client.errors import ConfigException
from kcoord.client.types import Node, OffsetAndMetadata, TopicPartition

NODE = Node(1, "host", 9092)
T0, T1 = TopicPartition("t", 0), TopicPartition("t", 1)
BUSY = MemberDescription(
    "busy", None, "app", "/10.0.0.1", frozenset({T0}), member_epoch=3, target_assignment=frozenset()
)
IDLE = MemberDescription("idle", None, "app", "/10.0.0.2", frozenset())
GROUP = ConsumerGroupDescription("g", "Consumer", "Stable", "consumer", "range", [IDLE, BUSY], NODE, 4, 3, 1000)


def test_tables_keep_every_cell(capsys: pytest.CaptureFixture[str]) -> None:
    columns = [OutputColumn("NAME", "name"), OutputColumn("COUNT", "count"), OutputColumn("AT", "at", time_text)]
    rows: list[dict[str, object]] = [{"name": "a", "count": 10, "at": 0}, {"name": None, "count": None, "at": None}]
    print_rows(columns, rows, as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "NAME  COUNT  AT",
        "a        10  1970-01-01T00:00:00.000Z",
        "-         -  N/A",
    ]


def test_json_has_the_columns(capsys: pytest.CaptureFixture[str]) -> None:
    print_rows([OutputColumn("A", "a")], [{"a": 1, "b": 2}], as_json=True)
    assert json.loads(capsys.readouterr().out) == [{"a": 1}]


def test_cells() -> None:
    assert assignment_text({"u": [2], "t": [0, 1]}) == "t:0,1;u:2"
    assert assignment_text({}) == assignment_text(None) == "-"
    assert node_text({"id": 1, "host": "h", "port": 9092}) == "h:9092 (1)"


def test_offsets_with_and_without_a_member() -> None:
    rows = offset_rows(GROUP, {T0: OffsetAndMetadata(7, "", 2), T1: OffsetAndMetadata(4)}, {T0: 10})
    keys = ("topic", "partition", "leader_epoch", "current_offset", "log_end_offset", "lag", "consumer_id")
    assert [tuple(row[key] for key in keys) for row in rows] == [
        ("t", 0, 2, 7, 10, 3, "busy"),
        ("t", 1, None, 4, None, None, None),
        (None, None, None, None, None, None, "idle"),
    ]


def test_an_assigned_partition_may_have_no_offset() -> None:
    row = offset_rows(GROUP, {T1: None}, {T0: 10})[0]
    assert (row["partition"], row["current_offset"], row["log_end_offset"], row["lag"]) == (0, None, 10, None)


def test_members_and_state() -> None:
    busy, idle = member_rows(GROUP)
    assert (busy["consumer_id"], busy["partitions"], busy["current_assignment"]) == ("busy", 1, {"t": [0]})
    assert (busy["current_epoch"], busy["target_epoch"], busy["target_assignment"]) == (3, 3, {})
    assert (idle["consumer_id"], idle["target_assignment"]) == ("idle", None)
    state = state_row(GROUP)
    assert (state["members"], state["group_epoch"], state["group_creation_time_ms"]) == (2, 4, 1000)


def test_columns_of_instance_ids_and_upgrades_are_shown_only_with_values(capsys: pytest.CaptureFixture[str]) -> None:
    """As Kafka's tool does; recorded from 4.3.1 with groups of dynamic, static and mixed members."""
    static = replace(BUSY, group_instance_id="i", upgraded=True)
    classic = replace(IDLE, upgraded=False)
    for members, titles in (
        ([BUSY, IDLE], []),
        ([replace(BUSY, upgraded=True), replace(IDLE, upgraded=True)], []),
        ([static, replace(IDLE, upgraded=True)], ["GROUP-INSTANCE-ID"]),
        ([replace(BUSY, upgraded=True), classic], ["UPGRADED"]),
        ([static, classic], ["GROUP-INSTANCE-ID", "UPGRADED"]),
    ):
        group = replace(GROUP, members=members)
        options = argparse.Namespace(json=False, state=None, type=None)
        _print_tables(MEMBERS_VERBOSE, [member_rows(group)], [group], options)
        printed = capsys.readouterr().out.split("\n")[0].split()
        assert [title for title in printed if title in ("GROUP-INSTANCE-ID", "UPGRADED")] == titles


def test_columns_of_client_side_assignors_are_shown_only_with_values(capsys: pytest.CaptureFixture[str]) -> None:
    offered = OfferedAssignor("lag", -1, 2, 0, Metadata(1, b"abc"))
    member = replace(BUSY, client_assignors=(offered, offered._replace(name="sticky", reason=3)))
    options = argparse.Namespace(json=False, state=None, type=None)
    for members, cells in (
        ([BUSY], []),
        ([member], ["CLIENT-ASSIGNORS", "lag:-1-2,sticky:-1-2 (reason 3)"]),
        ([replace(BUSY, assignment_metadata=AssignmentMetadata(0, 4))], ["METADATA-VERSION", "4"]),
        ([replace(BUSY, assignment_metadata=AssignmentMetadata(0, -1, b"user data"))], ["METADATA-VERSION", "-1"]),
        ([replace(BUSY, assignment_metadata=AssignmentMetadata(9))], ["ASSIGNMENT-ERROR", "9"]),
    ):
        group = replace(GROUP, members=members)
        _print_tables(MEMBERS_VERBOSE, [member_rows(group)], [group], options)
        titles, row = capsys.readouterr().out.splitlines()
        assert titles.partition("TARGET-ASSIGNMENT")[2].split() == cells[:1]
        assert row.rstrip().endswith(cells[-1] if cells else "  -")
    (json_row,) = member_rows(replace(GROUP, members=[member]))
    assert json_row["client_assignors"] == [
        {
            "name": name,
            "minimum_version": -1,
            "maximum_version": 2,
            "reason": reason,
            "metadata_version": 1,
            "metadata_bytes": 3,
        }
        for name, reason in (("lag", 0), ("sticky", 3))
    ]


def test_topics_have_creation_times_as_in_kip_1327() -> None:
    partitions = [
        TopicPartitionInfo(0, NODE, 0, [1, 2], [1], [], 1_736_937_000_000, [], []),
        TopicPartitionInfo(1, None, 0, [1, 2], [], []),
    ]
    topic = TopicDescription("foo", bytes(16), False, partitions)
    head, first, second = topic_lines(topic, {"retention.ms": "1"})
    assert head.split("\t")[2:] == ["PartitionCount: 2", "ReplicationFactor: 2", "Configs: retention.ms=1"]
    assert first == (
        "\tTopic: foo\tPartition: 0\tLeader: 1\tReplicas: 1,2\tIsr: 1\tElr: \tLastKnownElr: "
        "\tCreationTimeMs: 2025-01-15T10:30:00.000Z"
    )
    assert second.endswith("Leader: none\tReplicas: 1,2\tIsr: \tElr: N/A\tLastKnownElr: N/A\tCreationTimeMs: N/A")
    assert json.loads(json.dumps(topic_json(topic, {})))["partitions"][1]["creation_time_ms"] is None


def _options(file: Path | None) -> argparse.Namespace:
    return argparse.Namespace(bootstrap_server="h:1", command_config=file, timeout=50)


def test_command_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "client.properties"
    file.write_text("bootstrap.servers=other:2\nrequest.timeout.ms=10\nsend.buffer.bytes=1\nclient.id=me\n")
    config = client_config(AdminConfig, _options(file))
    assert (config.bootstrap_addresses, config.request_timeout_ms, config.client_id) == ([("h", 1)], 10, "me")
    assert config.default_api_timeout_ms == 50
    assert capsys.readouterr().err == "warning: send.buffer.bytes has no effect here\n"


def test_options_override_the_file_and_the_file_overrides_defaults(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("bootstrap.servers=other:2\ndefault.api.timeout.ms=70\n")
    options = argparse.Namespace(bootstrap_server=None, command_config=file, timeout=None)
    config = client_config(AdminConfig, options)
    assert (config.bootstrap_addresses, config.default_api_timeout_ms, options.timeout) == ([("other", 2)], 70, 70)
    config = client_config(AdminConfig, argparse.Namespace(bootstrap_server=None, command_config=None, timeout=None))
    assert (config.bootstrap_addresses, config.default_api_timeout_ms) == ([("127.0.0.1", 9092)], 30_000)


def test_a_connection_is_never_less_secure_than_configured(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("security.protocol=SASL_SSL\n")
    with pytest.raises(ConfigException, match="GSSAPI"):
        client_config(AdminConfig, _options(file))
