# SPDX-License-Identifier: Apache-2.0
"""Counts and times requests with plain integers. Each object is used by one thread, which is usually the event loop's.

Times are in milliseconds, as in Kafka's metrics. `exposition` has the names of the metrics.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import Final

BUCKETS_MS: Final = (
    *(0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0),
    *(50.0, 100.0, 250.0, 500.0, 1000.0, 2500.0, 5000.0, 10000.0),
)
"""Upper bounds of the buckets of every histogram. The last bucket has no bound."""

LAG_CHECK_SECONDS: Final = 0.01
SAMPLE_SECONDS: Final = 1.0
WINDOW_SECONDS: Final = 30
"""The window of the rates; Kafka's is metrics.sample.window.ms."""

_KEY_AND_VERSION: Final = Struct(">hh")


class Histogram:
    """A histogram of durations with the buckets `BUCKETS_MS`, with their sum and the largest value."""

    __slots__ = ("counts", "largest_ms", "sum_ms")

    def __init__(self) -> None:
        self.counts = [0] * (len(BUCKETS_MS) + 1)
        self.sum_ms = 0.0
        self.largest_ms = 0.0

    def add(self, value_ms: float) -> None:
        """Counts a value in its bucket."""
        self.counts[bisect_left(BUCKETS_MS, value_ms)] += 1
        self.sum_ms += value_ms
        if value_ms > self.largest_ms:
            self.largest_ms = value_ms

    @property
    def count(self) -> int:
        """The number of values."""
        return sum(self.counts)


class RequestMeasures:
    """Times of the requests of all connections, by their first four bytes: API key and version.

    `throttles` has the throttle times of responses by API key. Those of 0 are not in the histograms.
    """

    __slots__ = ("_by_start", "throttles")

    def __init__(self) -> None:
        self._by_start: dict[bytes, Histogram] = {}
        self.throttles: dict[int, Histogram] = {}

    def add(self, start: bytes, seconds: float) -> None:
        """Adds a request of a served API and version, which begins with `start` and got its response after `seconds`.

        The number of such versions bounds the memory.
        """
        histogram = self._by_start.get(start)
        if histogram is None:
            histogram = self._by_start[start] = Histogram()
        histogram.add(seconds * 1000)

    def add_throttle(self, api_key: int, throttle_ms: int) -> None:
        """Adds a response that throttles its client."""
        self.throttles.setdefault(api_key, Histogram()).add(throttle_ms)

    def items(self) -> list[tuple[int, int, Histogram]]:
        """Returns (API key, version, histogram), sorted by key and version."""
        return sorted((*_KEY_AND_VERSION.unpack(start), histogram) for start, histogram in self._by_start.items())


class WriteMeasures:
    """Times of the writes of coordinator and metadata logs: `append` to the page cache, `flush` to the disk."""

    __slots__ = ("append", "flush")

    def __init__(self) -> None:
        self.append = Histogram()
        self.flush = Histogram()


class LoopLag:
    """Measures pauses of the event loop: how late a timer fires that is due every `LAG_CHECK_SECONDS`.

    It sees every pause that is longer than this interval, and measures it too short by up to this interval. `own` is
    the part in which the loop's thread used the CPU: a pause of the broker, not of the machine.
    """

    __slots__ = ("_cpu", "_due", "_loop", "_timer", "histogram", "own")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.histogram = Histogram()
        self.own = Histogram()
        self._loop = loop
        self._due = self._cpu = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Begins to measure, from the event loop's thread."""
        self._due, self._cpu = time.perf_counter() + LAG_CHECK_SECONDS, time.thread_time()
        self._timer = self._loop.call_later(LAG_CHECK_SECONDS, self._check)

    def _check(self) -> None:
        # The loop's own time does not advance during a turn, and its timers have whole milliseconds.
        lag = max(time.perf_counter() - self._due, 0.0)
        self.histogram.add(lag * 1000)
        self.own.add(min(lag, time.thread_time() - self._cpu) * 1000)
        self.start()

    def stop(self) -> None:
        """Ends the measurements."""
        if self._timer is not None:
            self._timer.cancel()


class RecentRates:
    """The values of Kafka's sensors for the last `WINDOW_SECONDS`: idle ratios of the thread, and rates of counters.

    They come from one sample per second. A thread is idle while it uses no CPU time: it waits for requests, for the
    disk, or for the processor.
    """

    __slots__ = ("_counters", "_idle_ratios", "_loop", "_samples", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, counters: Callable[[], Mapping[str, int]]) -> None:
        self._loop = loop
        self._counters = counters
        self._samples: deque[tuple[float, float, Mapping[str, int]]] = deque(maxlen=WINDOW_SECONDS + 1)
        """Samples: wall time and CPU time of the thread in seconds, and the counters."""
        self._idle_ratios: deque[float] = deque(maxlen=WINDOW_SECONDS)
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Takes a sample now and then every second, in the calling thread."""
        self.take(time.perf_counter(), time.thread_time())
        self._timer = self._loop.call_later(SAMPLE_SECONDS, self.start)

    def take(self, now: float, cpu: float) -> None:
        """Takes one sample. Times are in seconds."""
        if self._samples:
            before, cpu_before, _ = self._samples[-1]
            busy = (cpu - cpu_before) / (now - before) if now > before else 0.0
            self._idle_ratios.append(min(max(1.0 - busy, 0.0), 1.0))
        self._samples.append((now, cpu, dict(self._counters())))

    def idle_ratios(self) -> tuple[float, float]:
        """Returns the average and the lowest idle ratio of a second; 1.0 before the second sample."""
        ratios = self._idle_ratios or (1.0,)
        return sum(ratios) / len(ratios), min(ratios)

    def rates(self, now: float) -> Mapping[str, float]:
        """Returns events per second by counter, over the window, or since the start if that is shorter."""
        counters = self._counters()
        began, _, before = self._samples[0] if self._samples else (now, 0.0, counters)
        span = max(now - began, SAMPLE_SECONDS)
        return {name: (count - before[name]) / span for name, count in counters.items()}

    def stop(self) -> None:
        """Takes no more samples."""
        if self._timer is not None:
            self._timer.cancel()


class Measures:
    """All measures of a broker with metrics."""

    __slots__ = ("lag", "recent", "requests", "writes")

    def __init__(self, loop: asyncio.AbstractEventLoop, counters: Callable[[], Mapping[str, int]]) -> None:
        self.lag = LoopLag(loop)
        self.recent = RecentRates(loop, counters)
        self.requests = RequestMeasures()
        self.writes = WriteMeasures()


@dataclass(frozen=True, slots=True)
class StandbyFigures:
    """The standbys of an instance in front of an upstream."""

    shards: int
    """The number of shards that this instance follows."""
    behind: int
    """How many of them have never been read to the end of their log."""
    lag: int
    """The largest number of offsets that a standby is behind the end of its log, as of the last fetch."""
    lag_ms: int
    """The longest time since a standby had read its log to the end."""
    copies_bytes: int
    """The bytes of the copies on disk."""
