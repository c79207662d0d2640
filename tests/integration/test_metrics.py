# SPDX-License-Identifier: Apache-2.0
"""The metrics page of a broker process that real clients use."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from prometheus_client.parser import text_string_to_metric_families

from kcoord_protocol.messages import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
)
from tests.integration.test_server import commit, find_coordinator
from tests.integration.wire import WireClient
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until


def scrape(broker: KcoordProcess) -> dict[tuple[str, tuple[str, ...]], float]:
    match = re.search(r"Metrics are at (http://127\.0\.0\.1:\d+/metrics)", broker.log)
    assert match is not None, broker.log
    return page_of(match[1])


def page_of(url: str) -> dict[tuple[str, tuple[str, ...]], float]:
    with urllib.request.urlopen(url, timeout=10) as page:
        text = page.read().decode()
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_page_counts_the_requests_of_a_consumer(tmp_path: Path) -> None:
    broker = KcoordProcess(tmp_path, {**FAST, "kcoord.metrics.port": "0"}).start()
    try:
        idle = scrape(broker)
        assert idle["kafka_group_coordinator_metrics_group_count", ("consumer",)] == 0
        admin = AdminClient({"bootstrap.servers": broker.address})
        admin.create_topics([NewTopic("t", 3, 1)])["t"].result(10)
        consumer = Consumer(
            {"bootstrap.servers": broker.address, "group.id": "g", "group.protocol": "consumer"}
            | {"auto.offset.reset": "earliest"}
        )
        consumer.subscribe(["t"])

        def has_assignment() -> bool:
            consumer.poll(0.1)
            return len(consumer.assignment()) == 3

        wait_until(has_assignment, "the consumer has its partitions", 30)
        consumer.commit(offsets=[TopicPartition("t", number, 5) for number in range(3)], asynchronous=False)
        page = scrape(broker)
        assert page["kafka_group_coordinator_metrics_consumer_group_count", ("Stable",)] == 1
        assert page["kafka_group_coordinator_metrics_offset_commit_total", ()] == 3
        assert page["kafka_group_coordinator_metrics_group_completed_rebalances_total", ("consumer",)] >= 1
        assert page["kafka_group_coordinator_metrics_event_queue_size", ()] >= 0
        assert 0 < page["kafka_group_coordinator_metrics_thread_idle_ratio_avg", ()] <= 1
        assert page["kafka_group_coordinator_metrics_consumer_group_rebalance_total", ()] >= 1
        assert page["kafka_network_request_metrics_total_time_ms_count", ("OffsetCommit",)] == 1
        assert page["kafka_network_request_metrics_total_time_ms_count", ("ConsumerGroupHeartbeat",)] >= 2
        assert page["kafka_server_socket_server_metrics_connection_count", ("PLAINTEXT",)] >= 1
        assert page["kafka_coordinator_runtime_metrics_num_partitions", ("groups", "active")] == 8
        assert page["kafka_log_flush_rate_and_time_ms_count", ()] >= 1
        assert page["kcoord_event_loop_lag_ms_count", ()] > 0
        assert page["process_resident_memory_bytes", ()] > 1e6
        consumer.close()
    finally:
        assert broker.stop() == 0
    broker.start()
    try:
        page = scrape_last(broker)
        assert page["kafka_group_coordinator_metrics_offset_commit_total", ()] == 0
        assert page["kafka_coordinator_runtime_metrics_partition_load_time_ms_count", ("groups",)] >= 1
    finally:
        broker.stop()


@pytest.mark.parametrize(("fast_paths", "workers"), [("true", 1), ("false", 1), ("true", 2)])
def test_the_meters_of_kip_496_count_every_event_once(tmp_path: Path, fast_paths: str, workers: int) -> None:
    settings = {
        "kcoord.metrics.port": "0",
        "kcoord.fast.paths.enable": fast_paths,
        "group.coordinator.threads": str(workers),
        "offsets.retention.check.interval.ms": "100",
    }
    broker = KcoordProcess(tmp_path, {**FAST, **settings}).start()
    try:
        admin = AdminClient({"bootstrap.servers": broker.address})
        admin.create_topics([NewTopic("t", 3, 1)])["t"].result(10)
        for group in ("simple", "other"):
            with coordinator(broker, group) as client:
                # The last commits take the fast path.
                for offset in range(4):
                    commit(client, group, "t", dict.fromkeys(range(3), offset))
                topics = [
                    OffsetDeleteRequest.OffsetDeleteRequestTopic(
                        name="t",
                        partitions=[OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=0)],
                    )
                ]
                # The second request has nothing to delete.
                for _ in range(2):
                    client.call(OffsetDeleteRequest(group_id=group, topics=topics), 0, OffsetDeleteResponse)
        with coordinator(broker, "old") as client:
            # OffsetCommit v2 has its own retention (KIP-211).
            request = OffsetCommitRequest(group_id="old", retention_time_ms=1, topics=offsets_of(1, 0, 1))
            request.generation_id_or_member_epoch = -1
            client.call(request, 2, OffsetCommitResponse)
        admin.delete_consumer_groups(["other"])["other"].result(10)
        consumer = Consumer({"bootstrap.servers": broker.address, "group.id": "c", "enable.auto.commit": False})
        consumer.subscribe(["t"])

        def has_assignment() -> bool:
            consumer.poll(0.1)
            return len(consumer.assignment()) == 3

        wait_until(has_assignment, "the consumer has its partitions", 30)
        wait_until(lambda: meter(broker, "offset_expirations_total") == 2, "the offsets of `old` have expired", 30)
        for name in ("offset_commits_total", "offset_commit_total", "offset_commit_count"):
            assert meter(broker, name) == 2 * 4 * 3 + 2
        for name in ("offset_deletions_total", "offset_deletion_total", "offset_deletion_count"):
            assert meter(broker, name) == 2
        assert meter(broker, "offset_expiration_count") == 2
        assert meter(broker, "group_completed_rebalances_total", "classic") == 1
        assert meter(broker, "group_completed_rebalance_count") == 1
        assert meter(broker, "group_completed_rebalances_total", "consumer") == 0
        assert meter(broker, "offset_commit_rate") > 0
        assert meter(broker, "classic_group_count", "Stable") == 1
        assert meter(broker, "classic_group_count", "PreparingRebalance") == 0
        consumer.close()
    finally:
        assert broker.stop() == 0


def coordinator(broker: KcoordProcess, group: str) -> WireClient:
    ports: list[int] = []

    def is_ready() -> bool:
        with WireClient(broker.port) as client:
            answer = find_coordinator(client, group).coordinators[0]
        ports.append(answer.port)
        return not answer.error_code

    wait_until(is_ready, f"{group} has a coordinator", 10)
    return WireClient(ports[-1])


def offsets_of(offset: int, *partitions: int) -> list[OffsetCommitRequest.OffsetCommitRequestTopic]:
    return [
        OffsetCommitRequest.OffsetCommitRequestTopic(
            name="t",
            partitions=[
                OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=index, committed_offset=offset)
                for index in partitions
            ],
        )
    ]


def meter(broker: KcoordProcess, name: str, *labels: str) -> float:
    """Returns the sum of a metric over the pages of all workers."""
    urls = re.findall(r"Metrics are at (http://127\.0\.0\.1:\d+/metrics)", broker.log)
    assert len(urls) == int(broker.overrides["group.coordinator.threads"])
    return sum(page_of(url)[f"kafka_group_coordinator_metrics_{name}", labels] for url in urls)


def scrape_last(broker: KcoordProcess) -> dict[tuple[str, tuple[str, ...]], float]:
    """Returns the page after a restart. The log file then also has the earlier address."""
    urls = re.findall(r"Metrics are at http://127\.0\.0\.1:(\d+)/metrics", broker.log)
    broker.log_file.write_text(f"Metrics are at http://127.0.0.1:{urls[-1]}/metrics")
    return scrape(broker)
