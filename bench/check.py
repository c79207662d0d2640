# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.check`: fails if the CPU time of a request, divided by that of an echo, is far above its limit.

It takes less than a minute. The limits have wide margins: it detects a fast path that is no longer used, but not a few
percent.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from bench import requests
from bench.wire import Broker, Echo

ROUNDS = 3
SECONDS_PER_ROUND = 0.5
LIMITS = {
    ("ConsumerGroupHeartbeat, steady", 8): 8.0,
    ("ConsumerGroupHeartbeat, steady", 1): 4.0,
    ("Heartbeat", 8): 8.0,
    ("OffsetCommit, 10 partitions", 8): 40.0,
    ("OffsetCommit, 1 partition, simple group", 8): 25.0,
    ("OffsetFetch, 10 partitions", 8): 20.0,
    ("Metadata v13, 10 topics x 30 partitions", 2): 6.0,
    ("DescribeTopicPartitions, likewise", 2): 6.0,
}
"""(request, requests in flight) -> limit of its CPU time, as a multiple of the echo's.

The limits are two to three times the figures in docs/performance.md.
"""


def main() -> int:
    settings = ("kcoord.log.flush.policy=os", *requests.SETTINGS)
    failures = []
    with tempfile.TemporaryDirectory() as folder, Echo() as echo, Broker(Path(folder), *settings) as broker:
        for load in requests.loads(broker, wide=False):
            limit = LIMITS.get((load.name, load.in_flight))
            if limit is None:
                continue
            broker_us, echo_us, _ = requests.compare(broker, echo, load, ROUNDS, SECONDS_PER_ROUND)
            ratio = broker_us / echo_us
            verdict = "" if ratio <= limit else "  TOO MUCH"
            shape = f"{load.name}, {load.in_flight} in flight"
            times = f"{broker_us:7.1f} us, echo {echo_us:5.1f} us"
            print(f"{shape:48} {times}: {ratio:6.1f} of {limit:g}{verdict}", flush=True)
            if verdict:
                failures.append(shape)
    if failures:
        print(f"more CPU per request than allowed: {'; '.join(failures)}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
