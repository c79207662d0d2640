# SPDX-License-Identifier: Apache-2.0
"""`kcoord upstream status` of two instances in front of another kcoord."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kcoord.cli.upstream_status import ranges_text
from kcoord.testing import KcoordBroker, start_broker
from tests.support.command_line import CommandLine, rows
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until

TOPIC = "orders"
SHARDS = int(FAST["offsets.topic.num.partitions"])
SHORT_SESSION = {"kcoord.upstream.session.timeout.ms": "1000", "kcoord.upstream.heartbeat.interval.ms": "100"}


@pytest.fixture(scope="module")
def upstream() -> Iterator[KcoordBroker]:
    with start_broker({"group.min.session.timeout.ms": "1000"}) as broker:
        broker.create_topic(TOPIC)
        broker.produce(TOPIC, ["a"] * 30)
        for group_id in ("imported", "gone", "waiting"):
            broker.commit(group_id, {TOPIC: {0: 3}})
        yield broker


@pytest.fixture
def instances(upstream: KcoordBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[KcoordProcess]]:
    made: list[KcoordProcess] = []
    for number in range(2):
        overrides = {
            **FAST,
            **SHORT_SESSION,
            "node.id": str(100 + number),
            "kcoord.upstream.bootstrap.servers": upstream.bootstrap_servers,
            "kcoord.upstream.ports": "0",
            "kcoord.upstream.import": "off",
        }
        made.append(KcoordProcess(tmp_path_factory.mktemp("instance"), overrides).start())
    yield made
    for instance in made:
        instance.kill()


def status(command: CommandLine, *arguments: str) -> dict[str, Any]:
    output = command.run("upstream", "status", "--json", *arguments)
    document: dict[str, Any] = json.loads(output.out)
    assert output.code == (1 if document["problems"] else 0), output
    return document


def test_two_instances(upstream: KcoordBroker, instances: list[KcoordProcess]) -> None:
    first, second = instances
    command = CommandLine(f"{first.address},{second.address}")
    wait_until(lambda: len(status(command)["instances"][1]["shards"]) == SHARDS // 2, "the second one has its shards")
    command.succeed("upstream", "import", "--group", "imported", "--group", "gone")
    command.succeed("consumer-groups", "--delete", "--group", "gone")
    document = status(command)
    assert document["problems"] == []
    assert [row["node_id"] for row in document["instances"]] == [100, 101]
    assert [row["address"] for row in document["instances"]] == [first.address, second.address]
    assert sorted(shard for row in document["instances"] for shard in row["shards"]) == list(range(SHARDS))
    assert sum(row["groups"] for row in document["instances"]) == 1
    (broker,) = document["brokers"]
    assert broker["address"] == upstream.bootstrap_servers
    assert broker["gateway"] not in (upstream.bootstrap_servers, None)
    assert broker["fetch"] == [4, 18]
    assert document["topic"]["partitions"] == SHARDS
    assert document["groups"] == [
        {"side": "kcoord", "count": 1, "states": {"Empty": 1}},
        {"side": "upstream", "count": 3, "states": {"Empty": 3}},
    ]
    only = {
        row["group"]: (row["state"], row["offsets"], row["lag"], row["import"]) for row in document["only_upstream"]
    }
    assert only == {
        "gone": ("Empty", 1, 27, "was here before; --again imports it"),
        "waiting": ("Empty", 1, 27, "would be imported"),
    }
    assert [row["group"] for row in status(command, "--group", "waiting")["only_upstream"]] == ["waiting"]
    shown = command.succeed("upstream", "status").out
    assert {row["SHARDS"] for row in rows(shown, "INSTANCE")} == {
        ranges_text(row["shards"]) for row in document["instances"]
    }
    assert "1 Empty" in shown
    assert "v4-v18" in shown
    second.kill()
    document = status(command)
    problem = f"instance 101 at {second.address} owns shards, but does not answer"
    assert problem in document["problems"]
    # The other instance gets all shards when the session of this one is over.
    wait_until(lambda: status(command)["problems"] == [], "no problem is left", 20)
    assert [ranges_text(row["shards"]) for row in status(command)["instances"]] == [f"0-{SHARDS - 1}"]


@pytest.mark.parametrize(
    ("numbers", "text"), [([], "-"), ([3], "3"), ([1, 2, 3], "1-3"), ([5, 0, 1, 7, 8], "0-1,5,7-8")], ids=str
)
def test_ranges(numbers: list[int], text: str) -> None:
    assert ranges_text(numbers) == text
