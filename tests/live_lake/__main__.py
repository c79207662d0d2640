# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.live_lake`: a lake on a Spark cluster follows live brokers, while all of them are killed in turn.

Clients commit, commit and abort transactions, reset and delete offsets, and groups move between the protocols. A
broker, a Spark worker, the driver and a compaction of the lake are killed with SIGKILL in turn. With `--move-leaders`
the leaders of the log's partitions move before each kill, as an operator moves them. At the end the lake is
compared with the ledger of the clients and with the log. The exit code is 1 if a record is missing or there twice, or
if no leader moved.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.live_lake.clients import PARTITIONS, TOPIC, Crowd
from tests.live_lake.leaders import Leaders
from tests.live_lake.stage import WORKERS, Compaction, Driver, Stage, brokers_of
from tests.live_lake.verdict import judge, log_records
from tests.support.confluent import create_topic
from tests.support.spark import small_options
from tests.support.spark_cluster import SparkCluster

_LAST_SECONDS = 900


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.live_lake", description=__doc__)
    parser.add_argument("--archive", type=Path, required=True, help="what `make spark-archive` writes")
    parser.add_argument("--brokers", choices=("kcoord", "kafka", "kafka3"), default="kcoord")
    parser.add_argument("--move-leaders", action="store_true", help="also move leaders (needs --brokers kafka3)")
    parser.add_argument("--seconds", type=float, default=600.0, help="how long the clients run")
    parser.add_argument("--interval", type=float, default=30.0, help="seconds between two kills")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="where logs and data stay (default: a temporary folder)")
    options = parser.parse_args()
    if options.move_leaders and options.brokers != "kafka3":
        parser.error("--move-leaders needs --brokers kafka3, because leaders move between brokers")
    if options.folder is not None:
        options.folder.mkdir(parents=True)
        return run(options, options.folder)
    with tempfile.TemporaryDirectory() as folder:
        return run(options, Path(folder))


def run(options: argparse.Namespace, folder: Path) -> int:
    lake = folder / "lake"
    with brokers_of(options.brokers, folder / "brokers") as (brokers, count):
        create_topic(brokers.address, TOPIC, PARTITIONS)
        crowd = Crowd(brokers.address, options.seed)
        with SparkCluster(folder, WORKERS) as spark, crowd.running():
            driver = Driver(folder, spark.master, options.archive.resolve(), lake, brokers.address)
            compaction = Compaction(lake)
            leaders = Leaders(brokers.address, folder) if options.move_leaders else None
            stage = Stage(brokers, count, spark, driver, compaction, leaders, options.seed)
            try:
                stage.play(options.seconds, options.interval)
            finally:
                driver.stop()
        print(f"kills: {stage.kills}", flush=True)
        log = log_records(brokers.address)
        copy_the_rest(brokers.address, lake)
        compaction.run()
        wrong = [*judge(lake, crowd.ledger, log, log_records(brokers.address))]
    if leaders is not None:
        print(f"leaders moved: {leaders.moved}")
        wrong += [f"no leader moved by {kind}" for kind, count in leaders.moved.items() if not count]
    for line in wrong:
        print(f"WRONG: {line}")
    return 1 if wrong else 0


def copy_the_rest(address: str, lake: Path) -> None:
    """Copies what the log got after the last batch of the driver."""
    command = [sys.executable, "-m", "kcoord", "lake", "ingest", "--bootstrap-server", address, "--lake", str(lake)]
    subprocess.run([*command, "--format", "delta", *small_options()], check=True, timeout=_LAST_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
