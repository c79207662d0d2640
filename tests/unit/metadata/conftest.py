# SPDX-License-Identifier: Apache-2.0
"""A cluster with two topics for the tests of handlers."""

from __future__ import annotations

import pytest

from tests.unit.metadata.cluster import Cluster, topic


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster({"auto.create.topics.enable": "true", "broker.rack": "r1"})
    cluster.create(topic("t3", 3), topic("t6", 6))
    return cluster
