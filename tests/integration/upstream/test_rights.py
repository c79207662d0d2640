# SPDX-License-Identifier: Apache-2.0
"""kcoord's user in the upstream needs exactly the documented rights. Each one that is missing is named."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from kcoord.testing import KcoordBroker, allow, start_broker
from kcoord_protocol.errors import KafkaError
from tests.integration.upstream.rights import CLIENT_ID, GROUP, RIGHTS, TOPIC, Right, use
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until

USERS = {"gateway": "gateway-secret", "alice": "alice-secret"}
OF_ALICE = [
    allow("alice", "Read", topic=TOPIC),
    allow("alice", "Read", group=GROUP),
    allow("alice", "Write", transactional_id=CLIENT_ID),
]
MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule required"
PARTITIONS = int(FAST["offsets.topic.num.partitions"])
SECONDS = 20.0
NAMED = {
    **{
        f"{operation} on topics __kcoord_": f"{operation} on topic __kcoord_"
        for operation in ("Create", "DescribeConfigs", "Read", "Write")
    },
    "Write on transactional ids kcoord-": "Write on transactional id kcoord-",
    "Write on transactional ids": f"Write on transactional id {CLIENT_ID}",
    "Describe on group *": f"Describe on group {GROUP}",
    "Describe on topic *": "Describe on them",
    "Describe on cluster": "Describe on the cluster",
}
"""What the log names, if that is not the right as it is in the table."""


def start(upstream: KcoordBroker, folder: Path) -> KcoordProcess:
    settings = {
        "kcoord.upstream.bootstrap.servers": upstream.bootstrap_servers,
        "kcoord.upstream.ports": "0",
        "kcoord.upstream.authentication": "pass-through",
        "kcoord.upstream.security.protocol": "SASL_PLAINTEXT",
        "kcoord.upstream.sasl.mechanism": "PLAIN",
        "kcoord.upstream.sasl.jaas.config": f'{MODULE} username="gateway" password="gateway-secret";',
        "listener.security.protocol.map": "PLAINTEXT:SASL_PLAINTEXT",
    }
    gateway = KcoordProcess(folder, {**FAST, **settings})
    gateway.spawn()
    return gateway


def use_as_alice(gateway: KcoordProcess) -> str:
    """Uses everything. Returns the error, empty if there is none."""
    ready = wait_until(lambda: re.findall(r"kcoord is ready: PLAINTEXT://(\S+),", gateway.log), "it is ready", SECONDS)
    properties = {
        "bootstrap.servers": ready[0],
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "PLAIN",
        "sasl.jaas.config": f'{MODULE} username="alice" password="alice-secret";',
        "default.api.timeout.ms": "2000",
    }

    try:
        asyncio.run(use(properties))
    except KafkaError as error:
        return str(error)
    return ""


def test_the_documented_rights_suffice(tmp_path: Path) -> None:
    acls = [*(right.acl("gateway") for right in RIGHTS), *OF_ALICE]
    with start_broker(users=USERS, acls=acls) as upstream:
        upstream.create_topic(TOPIC)
        upstream.commit(GROUP, {TOPIC: {0: 7}})
        for folder in (tmp_path / "first", tmp_path / "second"):
            folder.mkdir()
            gateway = start(upstream, folder)
            try:
                assert use_as_alice(gateway) == ""
                assert "lacks" not in gateway.log
            finally:
                gateway.kill()


@pytest.mark.parametrize("right", RIGHTS, ids=str)
def test_each_right_that_is_missing_is_named(right: Right, tmp_path: Path) -> None:
    acls = [*(other.acl("gateway") for other in RIGHTS if other is not right), *OF_ALICE]
    with start_broker(users=USERS, acls=acls) as upstream:
        upstream.create_topic(TOPIC)
        if right.operation == "DescribeConfigs":
            settings = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"}
            upstream.create_topic("__kcoord_offsets", PARTITIONS, settings)
        gateway = start(upstream, tmp_path)
        try:
            if right.is_for_clients:
                use_as_alice(gateway)
            text = f"kcoord's user in the upstream lacks the right {NAMED.get(str(right), str(right))}"
            if right == Right("Describe", "topic", "*"):
                text = "kcoord's user lacks the right Describe on them"
            wait_until(lambda: text in gateway.log, f"the right is named; log: {gateway.log_file}", SECONDS)
        finally:
            gateway.kill()
