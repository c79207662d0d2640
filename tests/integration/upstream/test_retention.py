# SPDX-License-Identifier: Apache-2.0
"""The retention that a lake takes from the brokers, if kcoord in front of them has another one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kcoord.client import AdminClient
from kcoord.pipeline.lake.samples import Retention, retention
from kcoord.pipeline.lake.settings import ExpiryPolicy
from kcoord.testing import KcoordBroker, start_broker
from kcoord.upstream.own_topics import OFFSETS_TOPIC
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC
from tests.integration.upstream.gateways import Gateways

POLICY = "kcoord.offsets.expiration.policy"
RETENTION = "offsets.retention.minutes"


@pytest.fixture(scope="module")
def upstream() -> Iterator[KcoordBroker]:
    with start_broker({RETENTION: "33", POLICY: "kafka"}) as broker:
        yield broker


@pytest.fixture(scope="module")
def gateways(upstream: KcoordBroker, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateways]:
    gateways = Gateways(upstream.bootstrap_servers, tmp_path_factory)
    yield gateways
    gateways.stop()


async def test_the_retention_is_that_of_the_brokers_whose_groups_are_in_the_topic(
    upstream: KcoordBroker, gateways: Gateways
) -> None:
    gateway = gateways.start(offsets_retention_minutes="77")
    async with AdminClient(bootstrap_servers=gateway.address) as admin:
        assert await retention(admin, OFFSETS_TOPIC) == Retention(77, ExpiryPolicy.KIP211)
        assert await retention(admin, GROUP_METADATA_TOPIC) == Retention(33, ExpiryPolicy.KAFKA)
    async with AdminClient(bootstrap_servers=upstream.bootstrap_servers) as admin:
        assert await retention(admin, OFFSETS_TOPIC) is None, "the cluster does not know it"
