# SPDX-License-Identifier: Apache-2.0
"""Runs a quick part of Kafka 4.3.1's own integration tests against kcoord. `make peersuite` runs all of them."""

from __future__ import annotations

import shutil

import pytest

from tests.conformance import peersuite
from tests.support.shared import missing

pytestmark = pytest.mark.java

CLASSES = (
    "ConsumerGroupHeartbeat|ConsumerGroupDescribe|ConsumerProtocolMigration|Offset(Commit|Fetch|Delete)|DeleteGroups"
    "|LeaveGroup"
)
METHODS = (
    "WithNewConsumerGroupProtocol|FeatureFlag|StaticConfig|SimpleGroup|DowngradeMigrationPolicy|Fenced|EmptyConsumerGroupId"
    "|InvalidRegular|Duplicate|Recreated|GroupErrors|PendingRevocation|WithNewGroupCoordinator"
    "|CooperativeAssignmentStrategyAndStatic"
)
SEVERAL_BROKERS = "AutoTopicCreation|RackAware|ConcurrentListOffsets|MaxInFlightOne"


def check(least: int, *options: str) -> None:
    for needed in ("java", "mvn"):
        if shutil.which(needed) is None:
            missing(f"{needed} is not installed")
    by_kafka = peersuite.passed_by_kafka()
    rows = list(peersuite.run(*options))
    failed = [row for row in rows if peersuite.judge(row, row.key in by_kafka) == "failed"]
    assert not failed
    assert sum(row.status == "PASS" for row in rows) >= least


def test_kcoord_passes_the_wire_tests_that_kafka_passes() -> None:
    check(20, "--suite", "wire", "--classes", CLASSES, "--methods", METHODS)


def test_workers_pass_the_tests_that_several_brokers_of_kafka_pass() -> None:
    check(7, "--suite", "data,txn", "--classes", SEVERAL_BROKERS)


def test_workers_pass_the_tests_that_move_partitions_and_restart_brokers() -> None:
    methods = "RecordsInSeparateBatchHaving|testAdminRebootstrap$"
    check(2, "--suite", "data", "--classes", "ListOffsetsIntegration|Rebootstrap", "--methods", methods)
