# SPDX-License-Identifier: Apache-2.0
"""The settings that peer_server makes from facts about a cluster, and the verdicts of peersuite."""

from __future__ import annotations

from tests.conformance.peer_server import read_facts, settings
from tests.conformance.peersuite import DIFFERENCES, Row, judge


def test_feature_levels_become_a_setting() -> None:
    properties = "peer.brokers=1\npeer.feature.group.version=0\npeer.feature.transaction.version=1\nnode.id=0\n"
    assert settings(read_facts(properties)) == ["kcoord.bootstrap.features=group.version=0,transaction.version=1"]
    assert settings(read_facts("peer.brokers=1\npeer.feature.share.version=1\n")) == []


def test_several_brokers_become_workers_with_their_ports_and_settings() -> None:
    properties = [
        "peer.brokers=2",
        "peer.listeners.0=EXTERNAL://localhost:1001,BROKER://localhost:1003",
        "peer.listeners.1=EXTERNAL://localhost:1002,BROKER://localhost:1004",
        "peer.broker.0.broker.rack=a",
        "peer.broker.1.broker.rack=b",
        "peer.broker.0.num.partitions=5",
        "peer.broker.3000.num.partitions=5",
    ]
    assert settings(read_facts("\n".join(properties))) == [
        "kcoord.worker.ports=1001,1002",
        "kcoord.worker.0.broker.rack=a",
        "kcoord.worker.1.broker.rack=b",
        "kcoord.worker.0.num.partitions=5",
        "num.partitions=5",
    ]


def test_principals_of_listeners() -> None:
    properties = ["peer.brokers=1", "peer.principal.BROKER=Group:broker", "peer.principal.EXTERNAL=Group:client"]
    expected = "kcoord.listener.principals=BROKER=Group:broker,EXTERNAL=Group:client"
    assert settings(read_facts("\n".join(properties))) == [expected]


def test_a_failure_counts_if_kafka_passes_and_no_difference_is_listed() -> None:
    def row(status: str, method: str = "testX", detail: str = "") -> Row:
        return Row(status, "C", method, f"{method} [1]", detail)

    listed = next(iter(DIFFERENCES))
    assert judge(row("PASS"), True) == "passed"
    assert judge(row("FAIL"), True) == "failed"
    assert judge(row("FAIL"), False).startswith("left out")
    assert judge(row("NA", detail="stops a broker"), True) == "left out: stops a broker"
    assert judge(row("FAIL", listed), True) == f"left out: {DIFFERENCES[listed]}"
    assert judge(row("FAIL", detail="the server process ended with status 3, see x"), True) == "failed"
