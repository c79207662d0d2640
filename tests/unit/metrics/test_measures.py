# SPDX-License-Identifier: Apache-2.0
"""Measures count events, and become text that Prometheus parses."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from kcoord.metrics.exposition import METERS, MetricsSnapshot, Timing, families
from kcoord.metrics.measures import BUCKETS_MS, Histogram, LoopLag, RecentRates, RequestMeasures


def test_a_histogram_puts_each_value_below_the_first_bound_that_is_not_smaller() -> None:
    histogram = Histogram()
    for value in (0.0, 0.05, 0.051, 10_000, 10_001):
        histogram.add(value)
    assert histogram.counts[:2] == [2, 1]
    assert histogram.counts[-2:] == [1, 1]
    assert (histogram.count, histogram.largest_ms) == (5, 10_001)
    assert len(histogram.counts) == len(BUCKETS_MS) + 1


def test_requests_are_counted_by_api_and_version() -> None:
    requests = RequestMeasures()
    requests.add(b"\x00\x03\x00\x0d", 0.001)
    requests.add(b"\x00\x03\x00\x0d", 0.003)
    requests.add(b"\x00\x03\x00\x0c", 0.002)
    rows = [(key, version, times.count, times.sum_ms) for key, version, times in requests.items()]
    assert rows == [(3, 12, 1, 2.0), (3, 13, 2, 4.0)]


async def test_loop_lag_sees_a_pause() -> None:
    lag = LoopLag(asyncio.get_running_loop())
    lag.start()
    await asyncio.sleep(0)
    time.sleep(0.05)
    while not lag.histogram.count:
        await asyncio.sleep(0.001)
    lag.stop()
    assert lag.histogram.largest_ms > 30
    assert lag.own.largest_ms < lag.histogram.largest_ms  # asleep, it used no CPU


def timing(*values: float) -> Timing:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    return Timing.of(histogram)


SNAPSHOT = MetricsSnapshot(
    requests=[(8, 9, timing(1.0)), (8, 10, timing(3.0, 70_000.0)), (999, 0, timing())],
    throttles={8: timing(400.0, 700.0)},
    connections={"PLAINTEXT": 3},
    authentications={("failed_authentication", "LOGIN"): 2},
    acls=6,
    audit=(11, 1),
    groups={("consumer", "Stable"): 2, ("consumer", "Empty"): 1, ("classic", "Empty"): 4},
    counters={"offset_commit": 17, "offset_expiration": 5},
    rates={"offset_commit": 1.5, "offset_expiration": 0.0}
    | {"authorization_request": 5.0, "authorization_allowed": 4.5, "authorization_denied": 0.5},
    completed={"classic": 2, "consumer": 3},
    assignor_failures={},
    client_computations={"installed": 1},
    client_computation_ms=1500,
    client_assignor_fallbacks=2,
    groups_waiting=0,
    instance=None,
    imports=None,
    queue_size=7,
    idle_ratios=(0.75, 0.5),
    shards={("groups", "active"): 50},
    loads={"groups": timing(120.0)},
    append=timing(0.2),
    flush=timing(),
    lag=timing(0.1, 12.0),
    own_lag=timing(0.1, 2.0),
)


class Fixed(Collector):
    def collect(self) -> object:  # type: ignore[override]
        return families(SNAPSHOT)


def test_prometheus_can_parse_the_page_and_finds_the_values_of_the_snapshot() -> None:
    registry = CollectorRegistry()
    registry.register(Fixed())
    samples = {
        (sample.name, tuple(value for _, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }
    assert samples["kafka_network_request_metrics_requests_total", ("OffsetCommit", "9")] == 1
    assert samples["kafka_network_request_metrics_requests_total", ("999", "0")] == 0
    assert samples["kafka_network_request_metrics_total_time_ms_count", ("OffsetCommit",)] == 3
    assert samples["kafka_network_request_metrics_total_time_ms_bucket", ("2.5", "OffsetCommit")] == 1
    assert samples["kafka_network_request_metrics_total_time_ms_bucket", ("10000.0", "OffsetCommit")] == 2
    assert samples["kafka_network_request_metrics_total_time_ms_bucket", ("+Inf", "OffsetCommit")] == 3
    assert samples["kafka_network_request_metrics_throttle_time_ms_count", ("OffsetCommit",)] == 3
    assert samples["kafka_network_request_metrics_throttle_time_ms_sum", ("OffsetCommit",)] == 1100
    assert samples["kafka_network_request_metrics_throttle_time_ms_bucket", ("0.05", "OffsetCommit")] == 1
    assert samples["kafka_group_coordinator_metrics_group_count", ("consumer",)] == 3
    assert samples["kafka_group_coordinator_metrics_consumer_group_count", ("Stable",)] == 2
    assert samples["kafka_group_coordinator_metrics_classic_group_count", ("Empty",)] == 4
    assert samples["kafka_group_coordinator_metrics_offset_commit_total", ()] == 17
    assert samples["kafka_coordinator_runtime_metrics_partition_load_time_max_ms", ("groups",)] == 120
    assert samples["kafka_server_socket_server_metrics_connection_count", ("PLAINTEXT",)] == 3
    assert samples["kafka_server_socket_server_metrics_failed_authentication_total", ("LOGIN",)] == 2
    authorizer = ("StandardAuthorizer", "authorizer.class.name", "broker")
    assert samples["kafka_server_plugins_acls_total_count", authorizer] == 6
    assert samples["kafka_server_plugins_authorization_request_rate_per_minute", authorizer] == 300
    assert samples["kafka_server_plugins_authorization_allowed_rate_per_minute", authorizer] == 270
    assert samples["kafka_server_plugins_authorization_denied_rate_per_minute", authorizer] == 30
    assert samples["kcoord_client_assignor_computations_total", ("installed",)] == 1
    assert samples["kcoord_client_assignor_computations_total", ("timeout",)] == 0
    assert samples["kcoord_client_assignor_seconds_count", ()] == 1
    assert samples["kcoord_client_assignor_seconds_sum", ()] == 1.5
    assert samples["kcoord_client_assignor_fallbacks_total", ()] == 2
    assert samples["kcoord_client_assignor_groups_waiting", ()] == 0
    assert samples["kcoord_audit_entries_total", ()] == 11
    assert samples["kcoord_audit_lost_entries_total", ()] == 1
    assert samples["kafka_log_flush_rate_and_time_ms_count", ()] == 0
    assert samples["kcoord_event_loop_lag_max_ms", ()] == 12
    assert samples["kcoord_event_loop_own_lag_max_ms", ()] == 2
    assert samples["kafka_group_coordinator_metrics_offset_commits_total", ()] == 17
    assert samples["kafka_group_coordinator_metrics_offset_commit_count", ()] == 17
    assert samples["kafka_group_coordinator_metrics_offset_commit_rate", ()] == 1.5
    assert samples["kafka_group_coordinator_metrics_offset_expirations_total", ()] == 5
    assert samples["kafka_group_coordinator_metrics_group_completed_rebalances_total", ("consumer",)] == 3
    assert samples["kafka_group_coordinator_metrics_event_queue_size", ()] == 7
    assert samples["kafka_group_coordinator_metrics_thread_idle_ratio_avg", ()] == 0.75
    assert samples["kafka_group_coordinator_metrics_thread_idle_ratio_min", ()] == 0.5
    assert samples["kafka_group_coordinator_metrics_num_partitions", ("active",)] == 50
    assert samples["kafka_group_coordinator_metrics_partition_load_time_avg", ()] == 120


def test_states_without_groups_or_partitions_are_0() -> None:
    zeros = {
        (family.name.removeprefix("kafka_group_coordinator_metrics_"), sample.labels["state"])
        for family in families(SNAPSHOT)
        for sample in family.samples
        if sample.labels.keys() == {"state"} and sample.value == 0
    }
    assert zeros == {
        *(("consumer_group_count", state) for state in ("Assigning", "Reconciling", "Dead")),
        *(("classic_group_count", state) for state in ("PreparingRebalance", "CompletingRebalance", "Stable", "Dead")),
        *(("num_partitions", state) for state in ("loading", "failed")),
    }


KAFKA_4_3_1 = """
offset-commit-count offset-commit-rate offset-expiration-count offset-expiration-rate offset-deletion-count
offset-deletion-rate group-completed-rebalance-count group-completed-rebalance-rate consumer-group-rebalance-count
consumer-group-rebalance-rate event-queue-size thread-idle-ratio-avg partition-load-time-avg partition-load-time-max
group-count:protocol=classic group-count:protocol=consumer num-partitions:state=loading num-partitions:state=active
num-partitions:state=failed consumer-group-count:state=Empty consumer-group-count:state=Assigning
consumer-group-count:state=Reconciling consumer-group-count:state=Stable consumer-group-count:state=Dead
"""
"""Attributes of kafka.server:type=group-coordinator-metrics, as a broker names them over JMX. The attributes of share
and streams groups and the times of single events are left out.
"""


def test_the_page_has_the_names_of_kafka() -> None:
    every_meter = dict.fromkeys(METERS, 0)
    names = set()
    for family in families(replace(SNAPSHOT, counters=every_meter, rates={**SNAPSHOT.rates, **every_meter})):
        for sample in family.samples:
            name = sample.name.removeprefix("kafka_group_coordinator_metrics_").replace("_", "-")
            labels = "".join(f":{label}={value}" for label, value in sample.labels.items())
            names.add(name + labels)
    assert set(KAFKA_4_3_1.split()) - names == set()


async def test_rates_and_idle_ratios_are_those_of_the_last_30_seconds() -> None:
    counts = {"offset_commit": 100}
    recent = RecentRates(asyncio.get_running_loop(), lambda: counts)
    assert (recent.idle_ratios(), recent.rates(0.0)) == ((1.0, 1.0), {"offset_commit": 0.0})
    recent.take(0.0, 5.0)
    counts["offset_commit"] += 30
    recent.take(1.0, 5.25)  # a quarter of this second was CPU time
    recent.take(2.0, 6.25)  # the whole second was CPU time
    assert recent.idle_ratios() == (0.375, 0.0)
    assert recent.rates(3.0) == {"offset_commit": 10.0}
    for second in range(3, 40):
        recent.take(float(second), 6.25)
    assert recent.idle_ratios() == (1.0, 1.0)
    assert recent.rates(39.0) == {"offset_commit": 0.0}
