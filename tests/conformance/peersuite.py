# SPDX-License-Identifier: Apache-2.0
"""Runs Kafka 4.3.1's own integration tests against kcoord, and compares the results with those of Kafka.

    python -m tests.conformance.peersuite [--suite wire,txn,data,restart] [--classes REGEX] [--methods REGEX]

A test that needs several brokers gets as many workers. The exit code is 1 if a test fails that Kafka passes, unless
`DIFFERENCES` has a reason for it. docs/conformance.md has the results.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.java import QUICK_START
from tests.support.shared import shared

SUITES = "wire,txn,data,restart"
SERVER = Path(__file__).with_name("peer_server.py")
RESULTS = "kafka-4.3.1-results.txt"

_ALL_OF_KAFKA = "compares the list of APIs and features with all of Kafka's, share and streams groups among them"
_STREAMS = "streams groups (KIP-1071) are not served"
DIFFERENCES = {
    "testApiVersionsRequest": _ALL_OF_KAFKA,
    "testApiVersionsRequestIncludesUnreleasedApis": _ALL_OF_KAFKA,
    "testApiVersionsRequestValidationV0": _ALL_OF_KAFKA,
    "testCoordinatorFailoverAfterCompactingPartitionWithUpgradedSimpleStreamsGroup": _STREAMS,
    "testCoordinatorFailoverAfterCompactingPartitionWithUpgradedStreamsGroup": _STREAMS,
    "testCoordinatorFailoverAfterCompactingPartitionWithUpgradedStreamsGroupAndTombstoneRemoved": _STREAMS,
    "testProducerRebootstrap": "demands that an unclean election loses a record; all replicas are one copy here",
}
"""Test methods that fail here on purpose, with the reason."""

_ROW = re.compile(r'^(PASS|FAIL|NA) +(\S+) (\S+) "(.*)" [\d.]+s(?: \| (.*))?$')


@dataclass(slots=True)
class Row:
    """The result of one test, as the suite prints it."""

    status: str
    test_class: str
    method: str
    display_name: str
    detail: str

    @property
    def key(self) -> tuple[str, str]:
        return self.test_class, self.display_name


def run(*options: str) -> Iterator[Row]:
    """Runs the suite and yields the rows as they are printed."""
    suite = shared("peersuite", "run.sh")
    work = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kcoord-tests" / "peersuite"
    work.mkdir(parents=True, exist_ok=True)
    server = shlex.join([sys.executable, str(SERVER)]) + " {data} {props}"
    process = subprocess.Popen(
        [str(suite), "--cmd", server, *options],
        stdout=subprocess.PIPE,
        text=True,
        cwd=SERVER.parents[2],
        env={**os.environ, "WORK": str(work), "PEER_CONTROL": "stdin", "JDK_JAVA_OPTIONS": QUICK_START},
    )
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if row := _ROW.match(line):
                status, test_class, method, display_name, detail = row.groups()
                yield Row(status, test_class, method, display_name, detail or "")
    finally:
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def passed_by_kafka() -> set[tuple[str, str]]:
    """Returns class and display name of each test that Kafka passes."""
    rows = (line.split("\t") for line in shared("peersuite", RESULTS).read_text().splitlines() if line[:1] != "#")
    return {(row[2], row[4]) for row in rows if row[1] == "PASS"}


def judge(row: Row, passes_in_kafka: bool) -> str:
    """Returns how a row counts: passed, failed, or left out with the reason."""
    if row.status == "PASS":
        return "passed"
    if not passes_in_kafka:
        return "left out: Kafka does not pass it either"
    if row.status == "NA":
        return f"left out: {row.detail}"
    reason = DIFFERENCES.get(row.method)
    return "failed" if reason is None else f"left out: {reason}"


def main(options: Sequence[str]) -> int:
    if "--suite" not in options:
        options = ["--suite", SUITES, *options]
    by_kafka = passed_by_kafka()
    counts = {"passed": 0, "failed": 0, "left out": 0}
    for row in run(*options):
        verdict = judge(row, row.key in by_kafka)
        counts[verdict.partition(":")[0]] += 1
        print(f"{row.test_class} {row.display_name}: {verdict}", flush=True)
        if verdict == "failed":
            print(f"    {row.detail}", flush=True)
    print(", ".join(f"{count} {name}" for name, count in counts.items()))
    return 1 if counts["failed"] or not counts["passed"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
