# SPDX-License-Identifier: Apache-2.0
"""The metrics page of a broker process that real clients use."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from prometheus_client.parser import text_string_to_metric_families

from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until


def scrape(broker: KcoordProcess) -> dict[tuple[str, tuple[str, ...]], float]:
    found = re.search(r"Metrics are at (http://127\.0\.0\.1:\d+/metrics)", broker.log)
    assert found is not None, broker.log
    with urllib.request.urlopen(found[1], timeout=10) as page:
        text = page.read().decode()
    return {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_the_page_tells_what_a_consumer_did(tmp_path: Path) -> None:
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


def scrape_last(broker: KcoordProcess) -> dict[tuple[str, tuple[str, ...]], float]:
    """After a restart: the log file has the earlier address, too."""
    urls = re.findall(r"Metrics are at http://127\.0\.0\.1:(\d+)/metrics", broker.log)
    broker.log_file.write_text(f"Metrics are at http://127.0.0.1:{urls[-1]}/metrics")
    return scrape(broker)
