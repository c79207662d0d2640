# SPDX-License-Identifier: Apache-2.0
"""The metrics page over HTTP: Kafka's names as its JMX exporter writes them, in snake case, and our own as `kcoord_`.

The HTTP server has a thread of its own. A scrape takes a `Snapshot` of plain numbers in the event loop, in slices, so
that many groups make no pause; the text is made in the thread.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as ScrapeTimeout
from dataclasses import dataclass
from threading import Thread
from typing import TypeAlias

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kcoord.metrics.measures import BUCKETS_MS, Histogram
from kcoord_protocol.api_keys import ApiKey

SCRAPE_SECONDS = 10.0

GROUPS = "kafka_group_coordinator_metrics"
RUNTIME = "kafka_coordinator_runtime_metrics"


METERS = {
    "offset_commit": "Committed offsets that were written.",
    "offset_expiration": "Offsets that expired.",
    "offset_deletion": "Offsets that administrators deleted.",
    "consumer_group_rebalance": "Group epochs of consumer groups.",
    "group_completed_rebalance": "Completed rebalances of classic groups.",
}
KIP_496_NAMES = {
    "offset_commit": "offset_commits",
    "offset_expiration": "offset_expirations",
    "offset_deletion": "offset_deletions",
}
"""The fourth, group_completed_rebalances, has a label for the protocol."""
GROUP_STATES = {
    "classic": ("Empty", "PreparingRebalance", "CompletingRebalance", "Stable", "Dead"),
    "consumer": ("Empty", "Assigning", "Reconciling", "Stable", "Dead"),
}
SHARD_STATES = ("loading", "active", "failed")


@dataclass(slots=True)
class Timing:
    """The values of one histogram at one moment."""

    counts: Sequence[int]
    sum_ms: float
    largest_ms: float

    @classmethod
    def of(cls, histogram: Histogram) -> Timing:
        return cls(tuple(histogram.counts), histogram.sum_ms, histogram.largest_ms)


@dataclass(slots=True)
class MetricsSnapshot:
    """Everything on the page but what the library itself adds (process and garbage collector)."""

    requests: Sequence[tuple[int, int, Timing]]
    """(API key, version, times)"""
    connections: Mapping[str, int]
    """By listener."""
    groups: Mapping[tuple[str, str], int]
    """By protocol and state."""
    counters: Mapping[str, int]
    """By the name of Kafka's sensor, which follows `kafka_group_coordinator_metrics_`."""
    rates: Mapping[str, float]
    """Per second, by the same names."""
    completed: Mapping[str, int]
    """Completed rebalances by protocol."""
    queue_size: int
    idle_ratios: tuple[float, float]
    """The average and the lowest one."""
    shards: Mapping[tuple[str, str], int]
    """By coordinator and state."""
    loads: Mapping[str, Timing]
    """Load times of shards by coordinator."""
    append: Timing
    flush: Timing
    lag: Timing
    own_lag: Timing


TakeSnapshot: TypeAlias = Callable[[], Coroutine[object, object, MetricsSnapshot]]


class BrokerCollector(Collector):
    """Called in the thread of the HTTP server."""

    def __init__(
        self, take: Callable[[], Coroutine[object, object, MetricsSnapshot]], loop: asyncio.AbstractEventLoop
    ) -> None:
        self._take = take
        self._loop = loop

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry would collect at once instead, in the thread of the event loop that has to answer."""
        return []

    def collect(self) -> Iterable[Metric]:
        coroutine = self._take()
        try:
            future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        except RuntimeError:  # the loop is closed: the broker stops
            coroutine.close()
            return []
        try:
            return families(future.result(SCRAPE_SECONDS))
        except ScrapeTimeout:
            future.cancel()
            raise


def families(snapshot: MetricsSnapshot) -> list[Metric]:
    """The metrics of a snapshot."""
    return [
        *_requests(snapshot),
        _gauge(
            "kafka_server_socket_server_metrics_connection_count",
            "Open connections.",
            ["listener"],
            {(name,): count for name, count in snapshot.connections.items()},
        ),
        *_groups(snapshot),
        *_runtime(snapshot),
        _histogram("kafka_log_append_time_ms", "Appends to coordinator and metadata logs.", [], {(): snapshot.append}),
        _histogram(
            "kafka_log_flush_rate_and_time_ms", "Flushes of coordinator and metadata logs.", [], {(): snapshot.flush}
        ),
        _histogram("kcoord_event_loop_lag_ms", "How late the event loop was, asked often.", [], {(): snapshot.lag}),
        _gauge(
            "kcoord_event_loop_lag_max_ms", "The longest pause of the event loop.", [], {(): snapshot.lag.largest_ms}
        ),
        _histogram("kcoord_event_loop_own_lag_ms", "What of that it computed itself.", [], {(): snapshot.own_lag}),
        _gauge("kcoord_event_loop_own_lag_max_ms", "The longest of them.", [], {(): snapshot.own_lag.largest_ms}),
    ]


def _requests(snapshot: MetricsSnapshot) -> list[Metric]:
    times: dict[tuple[str, ...], Timing] = {}
    counts: dict[tuple[str, ...], float] = {}
    for api_key, version, timing in snapshot.requests:
        name = _api_name(api_key)
        counts[name, str(version)] = sum(timing.counts)
        known = times.get((name,))
        times[name,] = timing if known is None else _sum(known, timing)
    prefix = "kafka_network_request_metrics"
    return [
        _counter(f"{prefix}_requests", "Requests that were answered or refused.", ["request", "version"], counts),
        _histogram(f"{prefix}_total_time_ms", "From the whole request to its answer.", ["request"], times),
    ]


def _groups(snapshot: MetricsSnapshot) -> list[Metric]:
    by_protocol: dict[tuple[str, ...], float] = {("classic",): 0, ("consumer",): 0}
    by_state: dict[str, dict[tuple[str, ...], float]] = {
        protocol: {(state,): 0.0 for state in states} for protocol, states in GROUP_STATES.items()
    }
    for (protocol, state), count in snapshot.groups.items():
        by_protocol[protocol,] += count
        by_state[protocol][state,] = count
    completed: dict[tuple[str, ...], float] = {(protocol,): count for protocol, count in snapshot.completed.items()}
    return [
        _gauge(f"{GROUPS}_group_count", "Groups by protocol.", ["protocol"], by_protocol),
        _gauge(f"{GROUPS}_consumer_group_count", "Consumer groups by state.", ["state"], by_state["consumer"]),
        _gauge(f"{GROUPS}_classic_group_count", "Classic groups by state.", ["state"], by_state["classic"]),
        *(metric for name in snapshot.counters for metric in _meter(name, snapshot)),
        _counter(f"{GROUPS}_group_completed_rebalances", "Completed rebalances by protocol.", ["protocol"], completed),
        _gauge(
            f"{GROUPS}_event_queue_size",
            "Requests that wait to be processed, background tasks, and timers that are due.",
            [],
            {(): snapshot.queue_size},
        ),
        _gauge(
            f"{GROUPS}_thread_idle_ratio_avg",
            "The share of the last 30 s in which the thread of the event loop was idle.",
            [],
            {(): snapshot.idle_ratios[0]},
        ),
        _gauge(
            f"{GROUPS}_thread_idle_ratio_min",
            "The same for the busiest of these seconds.",
            [],
            {(): snapshot.idle_ratios[1]},
        ),
    ]


def _meter(name: str, snapshot: MetricsSnapshot) -> Iterable[Metric]:
    """One of Kafka's meters: `-count` and `-rate` as Kafka names them, and as a counter by that name and KIP-496's."""
    text, count = METERS[name], snapshot.counters[name]
    yield _counter(f"{GROUPS}_{name}", text, [], {(): count})
    yield _gauge(f"{GROUPS}_{name}_count", text, [], {(): count})
    yield _gauge(f"{GROUPS}_{name}_rate", f"{text[:-1]}, per second of the last 30.", [], {(): snapshot.rates[name]})
    if name in KIP_496_NAMES:
        yield _counter(f"{GROUPS}_{KIP_496_NAMES[name]}", text, [], {(): count})


def _runtime(snapshot: MetricsSnapshot) -> list[Metric]:
    loads: dict[tuple[str, ...], Timing] = {(name,): timing for name, timing in snapshot.loads.items()}
    longest: dict[tuple[str, ...], float] = {key: timing.largest_ms for key, timing in loads.items()}
    shards: dict[tuple[str, ...], float] = {(name, state): 0.0 for name in snapshot.loads for state in SHARD_STATES}
    shards.update(snapshot.shards.items())
    groups = snapshot.loads["groups"]
    return [
        _gauge(
            f"{RUNTIME}_num_partitions",
            "Coordinator partitions by state.",
            ["coordinator", "state"],
            shards,
        ),
        _gauge(
            f"{GROUPS}_num_partitions",
            "Partitions of __consumer_offsets by state.",
            ["state"],
            {(state,): count for (name, state), count in shards.items() if name == "groups"},
        ),
        _gauge(
            f"{GROUPS}_partition_load_time_avg",
            "Average load time of a partition of __consumer_offsets in ms.",
            [],
            {(): groups.sum_ms / max(sum(groups.counts), 1)},
        ),
        _gauge(f"{GROUPS}_partition_load_time_max", "The longest of them.", [], {(): groups.largest_ms}),
        _histogram(f"{RUNTIME}_partition_load_time_ms", "Loading of a coordinator partition.", ["coordinator"], loads),
        _gauge(f"{RUNTIME}_partition_load_time_max_ms", "The longest of them.", ["coordinator"], longest),
    ]


def _api_name(api_key: int) -> str:
    """Kafka's spelling, for example OffsetCommit."""
    try:
        return ApiKey(api_key).name.replace("_", " ").title().replace(" ", "")
    except ValueError:
        return str(api_key)


def _sum(one: Timing, other: Timing) -> Timing:
    counts = tuple(a + b for a, b in zip(one.counts, other.counts, strict=True))
    return Timing(counts, one.sum_ms + other.sum_ms, max(one.largest_ms, other.largest_ms))


def _counter(name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _gauge(name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=labels)
    for key, value in values.items():
        family.add_metric(key, value)
    return family


def _histogram(name: str, text: str, labels: Sequence[str], values: Mapping[tuple[str, ...], Timing]) -> Metric:
    family = HistogramMetricFamily(name, text, labels=labels)
    bounds = [*map(str, BUCKETS_MS), "+Inf"]
    for key, timing in values.items():
        total = 0
        buckets = []
        for bound, count in zip(bounds, timing.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        family.add_metric(key, buckets, timing.sum_ms)
    return family


class MetricsServer:
    """The page at `/metrics`. OSError where host and port cannot be had."""

    def __init__(
        self,
        host: str,
        port: int,
        take: TakeSnapshot,
        loop: asyncio.AbstractEventLoop,
    ) -> None:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(BrokerCollector(take, loop))
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)
        self._server, self._thread = start_http_server(port, host, registry)
        self.port = int(self._server.server_port)

    def close(self) -> None:
        """Takes no further scrapes. Nobody waits for the thread: a scrape in it may wait for us."""
        Thread(target=self._end, name="kcoord-metrics-end", daemon=True).start()

    def _end(self) -> None:
        self._server.shutdown()
        self._server.server_close()
