# SPDX-License-Identifier: Apache-2.0
"""Delegation tokens in a broker of two workers: Kafka's own tools, kcoord's commands and client, and librdkafka."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from kcoord import client
from kcoord.cli import main
from kcoord.logtools.metadata_source import read_metadata
from kcoord.storage.file_system import RealFileSystem
from tests.support.command_line import CommandLine
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.properties import write_properties
from tests.support.waiting import wait_until

USERS = ",".join(f"SCRAM-SHA-{bits}=[name={name},password=pw]" for name in ("alice", "bob") for bits in (256, 512))
SETTINGS = {
    **FAST,
    "listeners": "USERS://127.0.0.1:0",
    "listener.security.protocol.map": "USERS:SASL_PLAINTEXT",
    "sasl.enabled.mechanisms": "SCRAM-SHA-256,SCRAM-SHA-512",
    "kcoord.bootstrap.scram": USERS,
    "delegation.token.secret.key": "do-not-print-me",
    "delegation.token.expiry.check.interval.ms": "200",
    "group.coordinator.threads": "2",
    "node.id": "10",
}


class TokenBroker(KcoordProcess):
    """A broker, and the logins of its clients."""

    def login(self, user: str, password: str = "pw", *, bits: int = 512, is_token: bool = False) -> dict[str, str]:
        """Returns the client settings of a user, or of the holder of a token."""
        extension = ' tokenauth="true"' if is_token else ""
        return {
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": f"SCRAM-SHA-{bits}",
            "sasl.jaas.config": "org.apache.kafka.common.security.scram.ScramLoginModule required "
            f'username="{user}" password="{password}"{extension};',
        }

    def file(self, user: str, password: str = "pw", *, is_token: bool = False) -> str:
        return write_properties(self.data.parent / f"{user}.properties", self.login(user, password, is_token=is_token))

    def admin(self, login: dict[str, str], port: int | None = None) -> client.AdminClient:
        config = client.AdminConfig.from_properties({"bootstrap.servers": f"127.0.0.1:{port or self.port}", **login})
        return client.AdminClient(config)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TokenBroker]:
    process = TokenBroker(tmp_path_factory.mktemp("kcoord"), SETTINGS).start()
    yield process
    assert process.stop() == 0, process.log
    assert "do-not-print-me" not in process.log


@pytest.mark.parametrize("bits", [256, 512])
async def test_a_token_from_its_creation_to_its_end(broker: TokenBroker, bits: int) -> None:
    first, second = broker.ports
    async with (
        broker.admin(broker.login("alice"), first) as alice,
        broker.admin(broker.login("bob"), second) as bob,
    ):
        token = await alice.create_delegation_token(renewers=["User:bob"], max_life_time_ms=3_600_000)
        assert (token.owner, token.token_requester, token.renewers) == ("User:alice", "User:alice", ("User:bob",))
        assert token.max_timestamp - token.issue_timestamp == 3_600_000
        assert token in await bob.describe_delegation_tokens(["User:alice"])
        earlier = await bob.renew_delegation_token(token.hmac, renew_time_period_ms=60_000)
        assert token.issue_timestamp + 60_000 <= earlier < token.expiry_timestamp
        holder = broker.login(token.token_id, token.hmac_as_base64, bits=bits, is_token=True)
        for port in broker.ports:
            async with broker.admin(holder, port) as admin:
                await admin.create_topics([client.NewTopic(f"t-{bits}-{port}")])
                with pytest.raises(client.KafkaError) as refused:
                    await admin.create_delegation_token()
                assert refused.value.error is client.Errors.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED
        await bob.expire_delegation_token(token.hmac)
        assert token.token_id not in {left.token_id for left in await alice.describe_delegation_tokens()}
    for port in broker.ports:
        with pytest.raises(client.KafkaError) as failed:
            async with broker.admin(holder, port) as admin:
                await admin.list_topics()
        assert failed.value.error is client.Errors.SASL_AUTHENTICATION_FAILED
        assert str(failed.value).endswith(f"due to invalid credentials with SASL mechanism SCRAM-SHA-{bits}")


@pytest.mark.java
def test_kafkas_tools(broker: TokenBroker) -> None:
    tool, server = KafkaJars().tool, ["--bootstrap-server", broker.address]
    alice = ["--command-config", broker.file("alice")]
    options = ["--max-life-time-period", "-1", "--renewer-principal", "User:bob"]
    created = tool("delegation-tokens", *server, *alice, "--create", *options)
    (token_id,) = re.findall(r"Created delegation token with tokenId : (\S+)\n", created)
    (digest,) = re.findall(rf"^{token_id} +(\S+) +User:alice +User:alice +\[User:bob\] ", created, re.MULTILINE)
    holder = ["--command-config", broker.file(token_id, digest, is_token=True)]
    tool("topics", *server, *holder, "--create", "--topic", "by-token")
    # kcoord's command prints what Kafka's tool has printed.
    kcoord = CommandLine(broker.address)
    described = kcoord.succeed("delegation-tokens", *alice, "--describe", "--owner-principal", "User:alice").out
    assert created[created.index("\nTOKENID") :].strip() == described[described.index("\nTOKENID") :].strip()
    assert kcoord.succeed("topics", *holder, "--list").out.find("by-token\n") >= 0
    renewed = kcoord.succeed("delegation-tokens", *alice, "--renew", "--hmac", digest, "--renew-time-period", "-1").out
    assert renewed.startswith(f"Calling renew token operation with hmac :{digest} , renew-time-period :-1\n")
    assert re.search(r"\nCompleted renew operation\. New expiry date : \d{4}-\d\d-\d\dT\d\d:\d\d\n$", renewed)
    expire = ["--expire", "--hmac", "-", "--expiry-time-period", "-1"]
    expired = kcoord.succeed("delegation-tokens", *alice, *expire, stdin=f"{digest}\n").out
    assert digest not in expired
    gone = kcoord.run("delegation-tokens", *alice, *expire, stdin=f"{digest}\n")
    assert (gone.code, digest in gone.err) == (1, False)
    assert "DELEGATION_TOKEN_NOT_FOUND" in gone.err


def test_librdkafka_cannot_log_in_with_a_token(broker: TokenBroker) -> None:
    """It sends no `tokenauth`, so the id of the token is the name of a user that does not exist."""
    created = CommandLine(broker.address).succeed(
        *("delegation-tokens", "--command-config", broker.file("alice"), "--json", "--create"),
        *("--max-life-time-period", "-1"),
    )
    token_id, digest = re.findall(r'"(?:token_id|hmac)": "(\S+)"', created.out)
    errors: list[str] = []
    settings: dict[str, Any] = {
        "bootstrap.servers": broker.address,
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": "SCRAM-SHA-512",
        "sasl.username": token_id,
        "sasl.password": digest,
        "log_level": 0,
        "error_cb": lambda error: errors.append(error.str()),
    }
    admin = AdminClient(settings)

    def is_refused() -> bool:
        admin.poll(0.1)
        return any("invalid credentials with SASL mechanism SCRAM-SHA-512" in error for error in errors)

    wait_until(is_refused, "the client reports the error")


async def test_the_controller_removes_expired_tokens(broker: TokenBroker) -> None:
    async with (
        broker.admin(broker.login("alice"), broker.ports[0]) as alice,
        broker.admin(broker.login("bob"), broker.ports[1]) as bob,
    ):
        short = await alice.create_delegation_token(renewers=["User:bob"], max_life_time_ms=1)
        long = await alice.create_delegation_token(renewers=["User:bob"])
        async with asyncio.timeout(10):
            while short.token_id in (left := {token.token_id for token in await bob.describe_delegation_tokens()}):
                await asyncio.sleep(0.02)
        assert long.token_id in left
    assert f"Delegation token expired for token: {short.token_id} for owner: User:alice" in broker.log


async def test_tokens_survive_kill_9_and_an_export(broker: TokenBroker, tmp_path: Path) -> None:
    async with broker.admin(broker.login("alice"), broker.ports[1]) as alice:
        token = await alice.create_delegation_token()
        removed = await alice.create_delegation_token()
        await alice.expire_delegation_token(removed.hmac)
    broker.restart(signal.SIGKILL)
    holder = broker.login(token.token_id, token.hmac_as_base64, is_token=True)
    for port in broker.ports:
        async with broker.admin(holder, port) as admin:
            await admin.list_topics()
    async with broker.admin(broker.login("alice")) as alice:
        described = {left.token_id: left for left in await alice.describe_delegation_tokens()}
    assert described[token.token_id] == token
    assert removed.token_id not in described
    broker.stop()
    assert main(["log", "export", str(broker.data), str(tmp_path / "kafka")]) == 0
    exported = read_metadata(RealFileSystem(), str(tmp_path / "kafka" / "__cluster_metadata-0")).image
    assert exported.delegation_tokens.keys() == described.keys()
    broker.start()
