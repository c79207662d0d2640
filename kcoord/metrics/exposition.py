# SPDX-License-Identifier: Apache-2.0
"""The text of the metrics page. `kcoord.metrics.server` serves it.

Kafka's metrics have the names of its JMX exporter in snake case. Metrics that only kcoord has begin with `kcoord_`.

A scrape takes a `MetricsSnapshot` in the event loop, in slices, so that many groups do not block the loop. The text is
formatted in a thread of the HTTP server.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)

from kcoord.metrics.measures import BUCKETS_MS, Histogram, StandbyFigures
from kcoord_protocol.api_keys import ApiKey

GROUPS = "kafka_group_coordinator_metrics"
RUNTIME = "kafka_coordinator_runtime_metrics"


METERS = {
    "offset_commit": "Committed offsets: partitions, not requests. Those of transactions count when they are written.",
    "offset_expiration": "Offsets that expired.",
    "offset_deletion": "Offsets that OffsetDelete requests of administrators deleted.",
    "consumer_group_rebalance": "Group epochs of consumer groups.",
    "group_completed_rebalance": "Completed rebalances of classic groups.",
}
KIP_496_NAMES = {
    "offset_commit": "offset_commits",
    "offset_expiration": "offset_expirations",
    "offset_deletion": "offset_deletions",
}
"""Names of KIP-496. Its fourth meter, group_completed_rebalances, has a label for the protocol."""
GROUP_STATES = {
    "classic": ("Empty", "PreparingRebalance", "CompletingRebalance", "Stable", "Dead"),
    "consumer": ("Empty", "Assigning", "Reconciling", "Stable", "Dead"),
}
AUTHENTICATIONS = {
    "successful_authentication": "Logins that succeeded: with SASL, or a TLS handshake on a listener without SASL.",
    "failed_authentication": "Logins and TLS handshakes that failed.",
    "successful_reauthentication": "Logins that renewed a session (KIP-368).",
    "failed_reauthentication": "Logins that did not renew a session, so that the connection was closed.",
}
AUTHORIZER_LABELS = {"config": "authorizer.class.name", "class": "StandardAuthorizer", "role": "broker"}
"""The labels that KIP-877 gives to the metrics of an authorizer."""
AUTHORIZER_RATES = {
    "authorization_request": "Decisions of the authorizer per minute. A request that a fast path answers needs none.",
    "authorization_allowed": "Permissions per minute.",
    "authorization_denied": "Denials per minute, with those that only leave something out of a response.",
}
SHARD_STATES = ("loading", "active", "failed")
IMPORTS = ("imported", "failed")
CLIENT_OUTCOMES = ("installed", "error", "invalid", "failed", "timeout", "gone", "superseded")


@dataclass(slots=True)
class Timing:
    """A copy of the values of a histogram."""

    counts: Sequence[int]
    sum_ms: float
    largest_ms: float

    @classmethod
    def of(cls, histogram: Histogram) -> Timing:
        """Copies the state of `histogram`."""
        return cls(tuple(histogram.counts), histogram.sum_ms, histogram.largest_ms)


@dataclass(slots=True)
class InstanceFigures:
    """What an instance in front of an upstream owns."""

    generation: int
    """The generation of the instances' group, -1 before the first assignment."""
    instances: int
    """The number of live instances, as far as this one knows."""
    shards: int
    """The number of shards that this instance owns; 0 without a lease."""
    lease_ms: int
    """The time until the lease ends, 0 without a lease."""
    lost_leases: int
    fenced_writes: int
    takeovers: Timing
    """The times from an assignment until the shards that it added are served."""
    produces: Timing
    """The times until the upstream has acknowledged a batch of a shard."""
    standbys: StandbyFigures


@dataclass(slots=True)
class MetricsSnapshot:
    """All values of the page except those that the library adds (process and garbage collector)."""

    requests: Sequence[tuple[int, int, Timing]]
    """(API key, version, times) of every served API version that was requested."""
    throttles: Mapping[int, Timing]
    """Throttle times of responses by API key, without those of 0."""
    connections: Mapping[str, int]
    """Open connections by listener."""
    authentications: Mapping[tuple[str, str], int]
    """Counts by the names of AUTHENTICATIONS and listener, for listeners with TLS or SASL."""
    acls: int | None
    """Number of ACLs; None without an authorizer. `rates` then has the names of AUTHORIZER_RATES, per second."""
    audit: tuple[int, int] | None
    """Numbers of entries in the audit log and of lost entries; None if there is no audit log."""
    groups: Mapping[tuple[str, str], int]
    """Number of groups by protocol and state."""
    counters: Mapping[str, int]
    """Counts by the name of Kafka's sensor, without the prefix `kafka_group_coordinator_metrics_`."""
    rates: Mapping[str, float]
    """Events per second, by the same names."""
    completed: Mapping[str, int]
    """Completed rebalances by protocol."""
    assignor_failures: Mapping[str, int]
    """Failed computations of target assignments, by assignor."""
    client_computations: Mapping[str, int] | None
    """Computations of target assignments by members, by outcome; None without client-side assignors."""
    client_computation_ms: int
    """The sum of the times of those that were installed."""
    client_assignor_fallbacks: int
    """Target assignments that were left to the broker, because all members had failed."""
    groups_waiting: int
    """Groups in which a member computes a target assignment now."""
    instance: InstanceFigures | None
    """The figures of an instance in front of an upstream; None for another broker."""
    imports: Mapping[str, int] | None
    """Numbers of imported groups, failed imports and imported offsets (`IMPORTS`); None if no groups are imported."""
    queue_size: int
    idle_ratios: tuple[float, float]
    """The average ratio and the lowest ratio."""
    shards: Mapping[tuple[str, str], int]
    """Number of shards by coordinator and state."""
    loads: Mapping[str, Timing]
    """Load times of shards by coordinator."""
    append: Timing
    flush: Timing
    lag: Timing
    own_lag: Timing


def families(snapshot: MetricsSnapshot) -> list[Metric]:
    """Returns the metrics of a snapshot."""
    return [
        *_requests(snapshot),
        _gauge(
            "kafka_server_socket_server_metrics_connection_count",
            "Open connections.",
            ["listener"],
            {(name,): count for name, count in snapshot.connections.items()},
        ),
        *_security(snapshot),
        *_groups(snapshot),
        *_runtime(snapshot),
        _histogram("kafka_log_append_time_ms", "Appends to coordinator and metadata logs.", [], {(): snapshot.append}),
        _histogram(
            "kafka_log_flush_rate_and_time_ms", "Flushes of coordinator and metadata logs.", [], {(): snapshot.flush}
        ),
        _histogram(
            "kcoord_event_loop_lag_ms", "Pauses of the event loop, checked every 10 ms.", [], {(): snapshot.lag}
        ),
        _gauge(
            "kcoord_event_loop_lag_max_ms", "The longest pause of the event loop.", [], {(): snapshot.lag.largest_ms}
        ),
        _histogram(
            "kcoord_event_loop_own_lag_ms",
            "The part of these pauses in which the event loop used the CPU. If it is small, the machine is busy.",
            [],
            {(): snapshot.own_lag},
        ),
        _gauge("kcoord_event_loop_own_lag_max_ms", "The longest such part.", [], {(): snapshot.own_lag.largest_ms}),
    ]


def _requests(snapshot: MetricsSnapshot) -> list[Metric]:
    times: dict[tuple[str, ...], Timing] = {}
    counts: dict[tuple[str, ...], float] = {}
    for api_key, version, timing in snapshot.requests:
        name = _api_name(api_key)
        counts[name, str(version)] = sum(timing.counts)
        earlier = times.get((name,))
        times[name,] = timing if earlier is None else _sum(earlier, timing)
    throttles: dict[tuple[str, ...], Timing] = {}
    for api_key, throttled in snapshot.throttles.items():
        total = times.get((_api_name(api_key),), throttled)
        unthrottled = max(sum(total.counts) - sum(throttled.counts), 0)
        throttles[_api_name(api_key),] = Timing(
            (throttled.counts[0] + unthrottled, *throttled.counts[1:]), throttled.sum_ms, throttled.largest_ms
        )
    prefix = "kafka_network_request_metrics"
    return [
        _counter(
            f"{prefix}_requests",
            "Requests of a served version that got a response, including errors.",
            ["request", "version"],
            counts,
        ),
        _histogram(
            f"{prefix}_total_time_ms",
            "Time from the whole request to its response, waiting for the disk included.",
            ["request"],
            times,
        ),
        _histogram(
            f"{prefix}_throttle_time_ms",
            "Throttle time of responses, 0 within the quotas. APIs that were never throttled are omitted.",
            ["request"],
            throttles,
        ),
    ]


def _security(snapshot: MetricsSnapshot) -> Iterable[Metric]:
    for name, text in AUTHENTICATIONS.items():
        by_listener: dict[tuple[str, ...], float] = {
            (listener,): count for (kind, listener), count in snapshot.authentications.items() if kind == name
        }
        yield _counter(f"kafka_server_socket_server_metrics_{name}", text, ["listener"], by_listener)
    if snapshot.acls is not None:
        labels, values = [*AUTHORIZER_LABELS], (*AUTHORIZER_LABELS.values(),)
        yield _gauge("kafka_server_plugins_acls_total_count", "ACLs.", labels, {values: snapshot.acls})
        for name, text in AUTHORIZER_RATES.items():
            rate = snapshot.rates[name] * 60
            yield _gauge(f"kafka_server_plugins_{name}_rate_per_minute", text, labels, {values: rate})
    if snapshot.audit is not None:
        written, lost = snapshot.audit
        yield _counter("kcoord_audit_entries", "Entries written to the audit log.", [], {(): written})
        yield _counter(
            "kcoord_audit_lost_entries", "Entries that could not be written to the audit log.", [], {(): lost}
        )


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
        _gauge(f"{GROUPS}_group_count", "Groups: classic or consumer.", ["protocol"], by_protocol),
        _gauge(
            f"{GROUPS}_consumer_group_count",
            "Consumer groups by state, 0 for a state without groups.",
            ["state"],
            by_state["consumer"],
        ),
        _gauge(
            f"{GROUPS}_classic_group_count",
            "Classic groups by state, 0 for a state without groups.",
            ["state"],
            by_state["classic"],
        ),
        *(metric for name in snapshot.counters for metric in _meter(name, snapshot)),
        _counter(
            f"{GROUPS}_group_completed_rebalances",
            "Classic groups: generations with assignments. Consumer groups: epochs that all members reached.",
            ["protocol"],
            completed,
        ),
        _counter(
            "kcoord_assignor_failures",
            "Target assignments that an assignor of one's own did not compute; the groups keep their targets.",
            ["assignor"],
            {(assignor,): count for assignor, count in snapshot.assignor_failures.items()},
        ),
        *_client_assignors(snapshot),
        *_instance(snapshot),
        *_imports(snapshot),
        _gauge(
            f"{GROUPS}_event_queue_size",
            "Requests that were read and wait, background tasks, and timers that are due.",
            [],
            {(): snapshot.queue_size},
        ),
        _gauge(
            f"{GROUPS}_thread_idle_ratio_avg",
            "The share of the last 30 s in which the thread of the event loop used no CPU.",
            [],
            {(): snapshot.idle_ratios[0]},
        ),
        _gauge(
            f"{GROUPS}_thread_idle_ratio_min",
            "The idle share of the busiest of these seconds.",
            [],
            {(): snapshot.idle_ratios[1]},
        ),
    ]


def _client_assignors(snapshot: MetricsSnapshot) -> Iterable[Metric]:
    outcomes = snapshot.client_computations
    if outcomes is None:
        return
    yield _counter(
        "kcoord_client_assignor_computations",
        "Computations of target assignments by members: installed, error (installed with an error of the assignor), "
        "invalid, failed, timeout, gone (the member left), superseded (the broker computed).",
        ["outcome"],
        {(outcome,): outcomes.get(outcome, 0) for outcome in CLIENT_OUTCOMES},
    )
    count = sum(outcomes.get(outcome, 0) for outcome in ("installed", "error"))
    yield SummaryMetricFamily(
        "kcoord_client_assignor_seconds",
        "Times from asking a member for a target assignment until it has installed it.",
        count_value=count,
        sum_value=snapshot.client_computation_ms / 1000,
    )
    yield _counter(
        "kcoord_client_assignor_fallbacks",
        "Target assignments left to the broker, because all members failed (kcoord.client.assignor.fallback=server).",
        [],
        {(): snapshot.client_assignor_fallbacks},
    )
    yield _gauge(
        "kcoord_client_assignor_groups_waiting",
        "Groups in which a member computes a target assignment now.",
        [],
        {(): snapshot.groups_waiting},
    )


def _instance(snapshot: MetricsSnapshot) -> Iterable[Metric]:
    figures = snapshot.instance
    if figures is None:
        return
    prefix = "kcoord_instance"
    yield _gauge(f"{prefix}_generation", "Generation of the instances' group.", [], {(): figures.generation})
    yield _gauge(f"{prefix}_instances", "Live instances, as this one knows them.", [], {(): figures.instances})
    yield _gauge(
        f"{prefix}_owned_shards", "Shards of the group coordinator that this instance owns.", [], {(): figures.shards}
    )
    yield _gauge(
        f"{prefix}_lease_ms",
        "Time until this instance may own shards no longer, if the upstream confirms no further heartbeat.",
        [],
        {(): figures.lease_ms},
    )
    yield _counter(
        f"{prefix}_lost_leases",
        "Times that the lease has ended: the instance was cut off, or stood still, for a session.",
        [],
        {(): figures.lost_leases},
    )
    yield _counter(
        f"{prefix}_fenced_writes",
        "Writes that the upstream has rejected because another instance had claimed the shard. Their clients retried.",
        [],
        {(): figures.fenced_writes},
    )
    yield _histogram(
        f"{prefix}_takeover_time_ms",
        "Times from an assignment until all shards that it added are served.",
        [],
        {(): figures.takeovers},
    )
    yield _gauge(f"{prefix}_takeover_time_max_ms", "The longest takeover.", [], {(): figures.takeovers.largest_ms})
    yield _histogram(
        f"{prefix}_produce_time_ms",
        "Times until the upstream has acknowledged a batch of a shard (acks=all). Commits wait that long, or longer.",
        [],
        {(): figures.produces},
    )
    yield _gauge(f"{prefix}_produce_time_max_ms", "The longest of these times.", [], {(): figures.produces.largest_ms})
    yield from _standbys(f"{prefix}_standby", figures.standbys)


def _standbys(prefix: str, figures: StandbyFigures) -> Iterable[Metric]:
    yield _gauge(f"{prefix}_shards", "Shards of other instances that this one follows.", [], {(): figures.shards})
    yield _gauge(
        f"{prefix}_behind_shards",
        "How many of them have not been read to the end of their log yet. A takeover reads the rest first.",
        [],
        {(): figures.behind},
    )
    yield _gauge(
        f"{prefix}_lag", "The largest number of offsets behind the end of a followed log.", [], {(): figures.lag}
    )
    yield _gauge(
        f"{prefix}_lag_ms", "The longest time since a followed log was read to its end.", [], {(): figures.lag_ms}
    )
    yield _gauge(
        f"{prefix}_copies_bytes", "Size of the copies of shards in the data folder.", [], {(): figures.copies_bytes}
    )


def _imports(snapshot: MetricsSnapshot) -> Iterable[Metric]:
    imports = snapshot.imports
    if imports is None:
        return
    yield _counter(
        "kcoord_group_imports",
        "Imports of groups from the upstream's own coordinator: imported groups, and attempts that failed, for example "
        "because the group still has members in the upstream.",
        ["outcome"],
        {(outcome,): imports.get(outcome, 0) for outcome in IMPORTS},
    )
    yield _counter(
        "kcoord_imported_offsets",
        "Committed offsets that were imported from the upstream's own coordinator.",
        [],
        {(): imports.get("offsets", 0)},
    )


def _meter(name: str, snapshot: MetricsSnapshot) -> Iterable[Metric]:
    """Yields a meter of Kafka: its `-count` and `-rate`, and a counter under its own name and under that of KIP-496."""
    text, count = METERS[name], snapshot.counters[name]
    yield _counter(f"{GROUPS}_{name}", text, [], {(): count})
    yield _gauge(f"{GROUPS}_{name}_count", text, [], {(): count})
    yield _gauge(
        f"{GROUPS}_{name}_rate",
        f"Events of `{name}_count` per second, over the last 30 s.",
        [],
        {(): snapshot.rates[name]},
    )
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
            "Coordinator partitions: loading, active or failed.",
            ["coordinator", "state"],
            shards,
        ),
        _gauge(
            f"{GROUPS}_num_partitions",
            "Partitions of `__consumer_offsets`: loading, active or failed.",
            ["state"],
            {(state,): count for (name, state), count in shards.items() if name == "groups"},
        ),
        _gauge(
            f"{GROUPS}_partition_load_time_avg",
            "Average load time of a partition of `__consumer_offsets` in ms.",
            [],
            {(): groups.sum_ms / max(sum(groups.counts), 1)},
        ),
        _gauge(f"{GROUPS}_partition_load_time_max", "The longest load time in ms.", [], {(): groups.largest_ms}),
        _histogram(
            f"{RUNTIME}_partition_load_time_ms", "Load time of a coordinator partition.", ["coordinator"], loads
        ),
        _gauge(f"{RUNTIME}_partition_load_time_max_ms", "The longest load time.", ["coordinator"], longest),
    ]


def _api_name(api_key: int) -> str:
    """Returns Kafka's spelling, for example OffsetCommit."""
    try:
        return ApiKey(api_key).name.replace("_", " ").title().replace(" ", "")
    except ValueError:
        return str(api_key)


def _sum(left: Timing, right: Timing) -> Timing:
    counts = tuple(a + b for a, b in zip(left.counts, right.counts, strict=True))
    return Timing(counts, left.sum_ms + right.sum_ms, max(left.largest_ms, right.largest_ms))


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
