# SPDX-License-Identifier: Apache-2.0
"""`kcoord groups expiry` and `restore` at kcoord in front of another kcoord, which has groups of the same names."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from kcoord.client import OffsetAndMetadata
from kcoord.testing import KcoordBroker, start_broker
from tests.integration.upstream.gateways import Gateways
from tests.integration.upstream.test_upstream_command import commit
from tests.support.command_line import CommandLine

TOPIC = "orders"
GROUP = "billing"


@pytest.fixture(scope="module")
def upstream() -> Iterator[KcoordBroker]:
    with start_broker() as broker:
        broker.create_topic(TOPIC, 1)
        broker.commit(GROUP, {TOPIC: {0: 10}})
        yield broker


@pytest.fixture(scope="module")
def command(upstream: KcoordBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CommandLine]:
    gateways = Gateways(upstream.bootstrap_servers, tmp_path_factory)
    gateway = gateways.start(offsets_retention_minutes="77")
    for offset in (20, 30):
        commit(gateway.address, GROUP, OffsetAndMetadata(offset))
    yield CommandLine(gateway.address)
    gateways.stop()


def test_expiry_has_the_offsets_and_the_retention_of_kcoord(
    command: CommandLine, caplog: pytest.LogCaptureFixture
) -> None:
    output = command.run("groups", "expiry", "--group", GROUP, "--json")
    assert output.code == 0, output
    assert caplog.text == "", "claims are no unknown records"
    (row,) = [row for row in json.loads(output.out) if row["topic"] == TOPIC]
    assert (row["offset"], row["retention_ms"]) == (30, 77 * 60_000)


def test_restore_finds_the_offsets_that_kcoord_had(command: CommandLine) -> None:
    output = command.run("groups", "restore", "--group", GROUP, "--to", "0s", "--dry-run", "--json")
    assert output.code == 0, output
    row = json.loads(output.out)
    assert (row["then"], row["now"], row["action"]) == (30, 30, "same")
