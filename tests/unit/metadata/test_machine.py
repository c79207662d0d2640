# SPDX-License-Identifier: Apache-2.0
"""The metadata machine beyond topics and configs: registration, producer ids, contract with the runtime."""

from __future__ import annotations

import pytest

from kcoord.config import BrokerConfig
from kcoord.config.scram_users import parse_bootstrap_scram
from kcoord.coordinator.group.group import GroupTimer
from kcoord.metadata.bootstrap import credential_records
from kcoord.metadata.image import ImageBuilder
from kcoord.metadata.machine import MetadataMachine
from kcoord.runtime.result import OperationContext, Task, TimerKey
from tests.unit.metadata.cluster import Cluster, registration, topic


def test_first_start_sets_feature_levels_and_registers_the_broker() -> None:
    cluster = Cluster()
    kinds = [type(record.value).__name__ for record in cluster.log]
    assert kinds == ["FeatureLevelRecord"] * 3 + ["RegisterBrokerRecord"]
    assert cluster.log[-1].value_version == 4
    assert cluster.image.features == {"metadata.version": 30, "group.version": 1, "transaction.version": 2}
    assert cluster.image.brokers[1].broker_epoch == 0


def test_feature_levels_of_a_new_cluster_can_be_set() -> None:
    cluster = Cluster({"kcoord.bootstrap.features": "group.version=0,transaction.version=1"})
    assert cluster.image.features == {"metadata.version": 30, "transaction.version": 1}


def test_only_a_new_cluster_gets_credentials() -> None:
    users = parse_bootstrap_scram("SCRAM-SHA-256=[name=alice,password=pw]")
    credentials = credential_records(users, lambda: b"salt")
    machine = MetadataMachine(BrokerConfig.from_properties({}))
    first = machine.register_brokers(OperationContext(0), [registration()], credentials).records
    assert [type(record.value).__name__ for record in first][2:] == [
        "FeatureLevelRecord", "UserScramCredentialRecord", "RegisterBrokerRecord",
    ]  # fmt: skip
    for record in first:
        machine.replay(record)
    assert machine.register_brokers(OperationContext(0), [registration()], credentials).records == []


def test_later_starts_register_only_changes() -> None:
    cluster = Cluster()
    assert cluster.register(registration()) == []
    moved = cluster.register(registration(host="elsewhere"))
    assert len(moved) == 1
    broker = cluster.image.brokers[1]
    assert (broker.broker_epoch, broker.endpoints[0][1]) == (1, "elsewhere")


def test_producer_id_blocks_do_not_overlap() -> None:
    cluster = Cluster()
    blocks = [cluster.run(lambda machine, context: machine.allocate_producer_ids(context, 1)) for _ in range(3)]
    assert [(block.first_id, block.size) for block in blocks] == [(0, 1000), (1000, 1000), (2000, 1000)]
    assert cluster.image.next_producer_id == 3000
    assert cluster.image.latest_producer_ids == (1, 0)


def test_the_image_is_the_same_object_until_a_record_is_replayed() -> None:
    cluster = Cluster()
    image = cluster.image
    assert cluster.image is image
    cluster.create(topic("a"))
    assert cluster.image is not image
    assert cluster.image.epoch > image.epoch
    assert "a" not in image.topics


def test_the_epoch_is_the_same_however_the_log_is_read() -> None:
    """Other workers, and the next start, replay the log in other portions."""
    cluster = Cluster()
    cluster.create(topic("a"), topic("b"))
    cluster.create(topic("c"))
    assert ImageBuilder.of(cluster.log).epoch == cluster.image.epoch == len(cluster.log)


def test_there_are_no_other_timers_and_no_tasks() -> None:
    machine: MetadataMachine = Cluster().machine
    context = OperationContext(0)
    key = TimerKey(GroupTimer.SESSION)
    loaded = machine.on_loaded(context)
    assert (loaded.records, loaded.timers, loaded.tasks) == ([], [], [])
    with pytest.raises(AssertionError):
        machine.fire_timer(context, key)
    with pytest.raises(AssertionError):
        machine.complete_task(context, Task(key, None), None)
