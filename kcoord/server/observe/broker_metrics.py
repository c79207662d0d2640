# SPDX-License-Identifier: Apache-2.0
"""Metrics of a broker process: the measures of a running broker, and the snapshot for a scrape.

This module and the Prometheus library are imported only if `kcoord.metrics.port` is set.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

from kcoord.metrics.exposition import AUTHENTICATIONS, MetricsSnapshot, Timing
from kcoord.metrics.measures import Measures, RequestMeasures
from kcoord.metrics.server import MetricsServer
from kcoord.server.api.api_table import DeferredResponse, Exchange
from kcoord.server.broker import Broker
from kcoord.server.net.listener import SocketListener
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.net.request_path import RequestPath

if TYPE_CHECKING:
    from kcoord.server.api.pieces import Pieces
    from kcoord.server.request_quota import RequestUse


class MeasuredPath(RequestPath):
    """A request path that measures for each request that is served the time until its response is known."""

    def __init__(self, requests: RequestMeasures, settings: PathSettings, on_response: Callable[[], None]) -> None:
        super().__init__(settings, on_response)
        self._requests = requests

    def _process_frame(self, frame: bytes, now_ms: int) -> None:
        began, start = time.perf_counter(), frame[:4]
        if self.apis.bound(start) is None:
            # Clients can make up any number of APIs and versions, and each of them would get its own row.
            super()._process_frame(frame, now_ms)
            return
        waiting = len(self._exchanges)
        super()._process_frame(frame, now_ms)
        if len(self._exchanges) > waiting:
            last = self._exchanges[-1]
            if isinstance(last, DeferredResponse):
                if last.data is None:
                    last.on_settled = partial(self._answered, start, began)
                    return
            elif isinstance(last, Exchange) and last.future is not None:
                last.future.add_done_callback(partial(self._answered, start, began))
                return
        self._requests.add(start, time.perf_counter() - began)

    def _complete(self, exchange: Exchange, response: object, use: RequestUse | None) -> bytes | Pieces:
        data = super()._complete(exchange, response, use)
        throttle_ms = getattr(response, "throttle_time_ms", 0)
        if throttle_ms:
            self._requests.add_throttle(exchange.bound.key, throttle_ms)
        return data

    def _answered(self, start: bytes, began: float, *_: object) -> None:
        self._requests.add(start, time.perf_counter() - began)


class BrokerMetrics:
    """The metrics of one broker process.

    All methods run in the event loop. The HTTP server has threads of its own, which ask the loop for a `snapshot`.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        broker: Broker,
        listeners: Sequence[SocketListener],
    ) -> None:
        self.measures = Measures(loop, lambda: {**self._totals(), **self._decisions()})
        self._loop = loop
        self._broker = broker
        self._groups = broker.groups
        self._transactions = broker.transactions
        self._listeners = listeners
        self._now_ms = broker.now_ms
        self._server: MetricsServer | None = None

    def new_path(self, settings: PathSettings, on_response: Callable[[], None]) -> RequestPath:
        """Returns a path whose requests count in the metrics."""
        return MeasuredPath(self.measures.requests, settings, on_response)

    def open(self, host: str, port: int) -> int:
        """Serves the metrics page. Returns the port, which differs from `port` if that is 0.

        Raises OSError if the address is not available.
        """
        self._server = MetricsServer(host, port, self.snapshot, self._broker.why_not_ready, self._loop)
        self.measures.lag.start()
        self.measures.recent.start()
        return self._server.port

    def close(self) -> None:
        self.measures.lag.stop()
        self.measures.recent.stop()
        if self._server is not None:
            self._server.close()

    def _totals(self) -> Mapping[str, int]:
        """Returns the counters by the names of Kafka's sensors, without `-count` and `-rate`."""
        counters = self._groups.counters
        return {
            "offset_commit": counters.offset_commits,
            "offset_expiration": counters.offset_expirations,
            "offset_deletion": counters.offset_deletions,
            "consumer_group_rebalance": counters.consumer_group_rebalances,
            "group_completed_rebalance": counters.classic_rebalances_completed,
        }

    def _decisions(self) -> Mapping[str, int]:
        """Returns the numbers of decisions of the authorizer; empty if there is none."""
        if self._broker.authorizer is None:
            return {}
        decided = self._broker.authorizer.decided
        return {
            "authorization_request": sum(decided.values()),
            "authorization_allowed": decided[True],
            "authorization_denied": decided[False],
        }

    async def snapshot(self) -> MetricsSnapshot:
        """Returns the current numbers.

        Other work runs in the event loop between the shards, so their groups are not counted at the same moment.
        """
        measures, services = self.measures, (self._groups, self._transactions)
        authorizer, audit = self._broker.authorizer, self._broker.audit
        counters = self._groups.counters
        groups: Counter[tuple[str, str]] = Counter()
        has_client_assignors, groups_waiting = self._broker.config.kcoord_client_assignors_enable, 0
        for shard_id in self._groups.shard_ids:
            shard = self._groups.shards.machine(shard_id)
            if shard is not None:
                groups.update(shard.count_groups())
                groups_waiting += shard.count_computations() if has_client_assignors else 0
                await asyncio.sleep(0)
        return MetricsSnapshot(
            requests=[(key, version, Timing.of(histogram)) for key, version, histogram in measures.requests.items()],
            throttles={key: Timing.of(histogram) for key, histogram in measures.requests.throttles.items()},
            connections={listener.address.name: len(listener.connections) for listener in self._listeners},
            authentications={
                (name, listener.address.name): listener.path_settings.logins[name]
                for listener in self._listeners
                if listener.address.security_protocol.has_tls or listener.address.security_protocol.has_sasl
                for name in AUTHENTICATIONS
            },
            acls=None if authorizer is None else authorizer.acl_count,
            audit=None if audit is None else (audit.file.written, audit.file.lost),
            groups=groups,
            counters=self._totals(),
            rates=measures.recent.rates(time.perf_counter()),
            completed={
                "classic": counters.classic_rebalances_completed,
                "consumer": counters.consumer_rebalances_completed,
            },
            assignor_failures=dict(counters.assignor_failures),
            client_computations=dict(counters.client_computations) if has_client_assignors else None,
            client_computation_ms=counters.client_computation_ms,
            client_assignor_fallbacks=counters.client_assignor_fallbacks,
            groups_waiting=groups_waiting,
            instance=self._broker.instance_figures(),
            imports=dict(counters.imports) if self._broker.config.kcoord_upstream_bootstrap_servers else None,
            queue_size=self._groups.shards.queue_size(self._now_ms())
            + sum(listener.connections.queued for listener in self._listeners),
            idle_ratios=measures.recent.idle_ratios(),
            shards={
                (service.shards.name, state): count
                for service in services
                for state, count in service.count_states().items()
            },
            loads={service.shards.name: Timing.of(service.load_times) for service in services},
            append=Timing.of(measures.writes.append),
            flush=Timing.of(measures.writes.flush),
            lag=Timing.of(measures.lag.histogram),
            own_lag=Timing.of(measures.lag.own),
        )
