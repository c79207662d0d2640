# SPDX-License-Identifier: Apache-2.0
"""A quick part of Kafka 4.3.1's own integration tests against kcoord; `make peersuite` runs all of them."""

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


def test_what_kafka_passes_is_passed_here() -> None:
    check(20, "--suite", "wire", "--classes", CLASSES, "--methods", METHODS)


def test_what_several_brokers_of_kafka_pass_is_passed_by_workers() -> None:
    check(7, "--suite", "data,txn", "--classes", SEVERAL_BROKERS)


def test_partitions_move_and_brokers_go_and_come_back() -> None:
    methods = "RecordsInSeparateBatchHaving|testAdminRebootstrap$"
    check(2, "--suite", "data", "--classes", "ListOffsetsIntegration|Rebootstrap", "--methods", methods)
