# SPDX-License-Identifier: Apache-2.0
"""Writes docs/reference/metrics.md from the code that makes the metrics. `--check` fails if the page differs."""

from __future__ import annotations

import sys
from pathlib import Path

from prometheus_client.core import Metric

from kcoord.metrics.exposition import (
    AUTHENTICATIONS,
    AUTHORIZER_RATES,
    METERS,
    InstanceFigures,
    MetricsSnapshot,
    Timing,
    families,
)
from kcoord.metrics.measures import BUCKETS_MS, WINDOW_SECONDS, StandbyFigures
from kcoord_protocol.api_keys import ApiKey

PAGE = Path(__file__).parent / "reference" / "metrics.md"

HEAD = f"""\
# Metrics

For operators who watch a broker. The metrics that `kcoord.metrics.port` serves at `/metrics`, with type and labels;
[Operations](../operations.md#monitor-metrics-for-prometheus) says which of them are worth an alarm.
`docs/make_metrics.py` makes this page from `kcoord/metrics/exposition.py`. `/ready` and `/health` on the same port are
for load balancers and supervisors: 200, or 503 with a reason.

The names are Kafka's, as its JMX exporter writes them in snake case. Metrics that only kcoord has begin with `kcoord_`.
Times are in milliseconds. The buckets of every histogram end at
{", ".join(f"{bound:g}" for bound in BUCKETS_MS)} ms.
Maxima cover the time since the process started. A `_rate` is per second of the last {WINDOW_SECONDS} s.

| metric | type | labels | what it measures |
|---|---|---|---|
"""
TAIL = """
The Prometheus library adds `process_*` (memory, CPU, file descriptors) and `python_gc_*` (garbage collections).

The meters of KIP-496 have the names of the KIP, such as `offset_commits`. Kafka ships them as `-count` and `-rate` of
other names, such as `offset_commit`; the page has both.
"""


def sample_snapshot() -> MetricsSnapshot:
    """Returns a snapshot in which every metric has a value."""
    timing = Timing((0,) * (len(BUCKETS_MS) + 1), 0.0, 0.0)
    return MetricsSnapshot(
        requests=[(ApiKey.OFFSET_COMMIT, 9, timing)],
        throttles={ApiKey.OFFSET_COMMIT: timing},
        connections={"PLAINTEXT": 1},
        authentications={(name, "SSL"): 0 for name in AUTHENTICATIONS},
        acls=0,
        audit=(0, 0),
        groups={},
        counters=dict.fromkeys(METERS, 0),
        rates=dict.fromkeys((*METERS, *AUTHORIZER_RATES), 0.0),
        completed={"classic": 0, "consumer": 0},
        assignor_failures={"lag-aware": 0},
        client_computations={"installed": 1},
        client_computation_ms=1500,
        client_assignor_fallbacks=2,
        groups_waiting=0,
        instance=InstanceFigures(1, 2, 25, 9000, 0, 0, timing, timing, StandbyFigures(25, 0, 0, 0, 0)),
        imports={"imported": 1, "offsets": 3},
        queue_size=0,
        idle_ratios=(1.0, 1.0),
        shards={},
        loads={"groups": timing, "transactions": timing},
        append=timing,
        flush=timing,
        lag=timing,
        own_lag=timing,
    )


def row(metric: Metric) -> str:
    """Returns the table row of a metric. Prometheus shows a counter with the suffix `_total`."""
    labels = dict.fromkeys(label for sample in metric.samples for label in sample.labels if label != "le")
    name = f"{metric.name}_total" if metric.type == "counter" else metric.name
    return f"| `{name}` | {metric.type} | {', '.join(f'`{label}`' for label in labels)} | {metric.documentation} |\n"


def main() -> int:
    """Writes or checks the page."""
    text = HEAD + "".join(row(metric) for metric in families(sample_snapshot())) + TAIL
    if "--check" in sys.argv[1:]:
        if PAGE.read_text() != text:
            print(f"{PAGE} is not what docs/make_metrics.py makes: run `make generate`", file=sys.stderr)
            return 1
        return 0
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
