# SPDX-License-Identifier: Apache-2.0
"""Runs the named measurements, or all short ones. Prints Markdown tables; `--json FILE` writes them as JSON too."""

from __future__ import annotations

import argparse
from pathlib import Path

from bench import (
    assignors,
    authorizer,
    classic,
    client_assignors,
    compaction,
    data,
    gateway,
    growth,
    memory,
    mixed,
    offload,
    pauses,
    recovery,
    requests,
    startup,
    storm,
    tls,
    upstream,
)
from bench.report import Report


def pipeline(report: Report) -> None:
    """Runs the measurement `pipeline`. The import is here because it needs the extra `spark`."""
    from bench import pipeline as measurement

    measurement.main(report)


def lake(report: Report) -> None:
    from bench import lake as measurement

    measurement.main(report)


def wire_source(report: Report) -> None:
    from bench import wire_source as measurement

    measurement.main(report)


def read_broker(report: Report) -> None:
    from bench import read_broker as measurement

    measurement.main(report)


MEASUREMENTS = {
    "startup": startup.main,
    "requests": requests.main,
    "data": data.main,
    "tls": tls.main,
    "gateway": gateway.main,
    "upstream": upstream.main,
    "storm": storm.main,
    "mixed": mixed.main,
    "assignors": assignors.main,
    "authorizer": authorizer.main,
    "offload": offload.main,
    "pauses": pauses.main,
    "growth": growth.main,
    "client-assignors": client_assignors.main,
    "classic": classic.main,
    "memory": memory.main,
    "recovery": recovery.main,
    "compaction": compaction.main,
    "pipeline": pipeline,
    "lake": lake,
    "wire-source": wire_source,
    "read-broker": read_broker,
}
LONG = {
    *("client-assignors", "compaction", "growth", "offload", "pauses", "pipeline", "lake", "read-broker", "upstream"),
    "wire-source",
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"measurement to run: {', '.join(MEASUREMENTS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all tables to FILE as JSON")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - MEASUREMENTS.keys())
    if unknown:
        parser.error(f"unknown measurement {', '.join(unknown)}; the measurements are {', '.join(MEASUREMENTS)}")
    report = Report()
    for name in arguments.names or [name for name in MEASUREMENTS if name not in LONG]:
        MEASUREMENTS[name](report)
        if arguments.json is not None:
            report.write_json(arguments.json)


main()
