# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.peers`: compares kcoord with Apache Kafka and kfake, by generator and script of the shared folder.

Starts kcoord with Kafka's default assignment interval, and for the join storm without an interval. Runs
`bench/run-anchors.sh` against both and prints its table. `--only` and `--scenarios` are options of the script, and its
environment variables (SECONDS_PER, WARMUP, MAXM, REC_GROUPS, ...) apply. This needs Go, and a JDK and Maven for Kafka.
The scenarios `produce` and `consume` use Kafka's own perf tools instead of the script (`bench.data_plane`).
"""

from __future__ import annotations

import argparse
import os
import resource
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from datetime import date
from pathlib import Path

from bench import data_plane
from bench.report import Report, write_into
from bench.wire import Broker

OS = "kcoord.log.flush.policy=os"
DOCUMENT_SECTION = "bench-peers: produce and consume"
NO_INTERVAL = ("group.consumer.assignment.interval.ms=0", "group.consumer.min.assignment.interval.ms=0")
SCENARIOS = (
    "echo startup heartbeat commit simple_commit fetch metadata describe_topic_partitions classic join_storm mixed "
    "fetch_all recovery produce consume"
)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.peers", description=__doc__)
    parser.add_argument(
        "--only", default="kafka kfake", help="peers to compare, in one argument (default 'kafka kfake'); '' for none"
    )
    parser.add_argument("--scenarios", default=SCENARIOS, help="scenarios of the script, in one argument")
    parser.add_argument(
        "--document",
        type=Path,
        metavar="FILE",
        help="also write the tables of produce and consume into the section of this Markdown file that has them",
    )
    arguments = parser.parse_args()
    shared = Path(os.environ.get("KCOORD_SHARED", "../shared"))
    script = shared / "bench" / "run-anchors.sh"
    peers, scenarios = arguments.only.split(), arguments.scenarios.split()
    data_scenarios = [scenario for scenario in scenarios if scenario in data_plane.SCENARIOS]
    scenarios = [scenario for scenario in scenarios if scenario not in data_scenarios]
    tools = ["go", "java", "mvn"] if "kafka" in peers or data_scenarios else ["go"]
    missing = [tool for tool in tools if shutil.which(tool) is None] + ([] if script.exists() else [str(script)])
    if missing:
        print(f"bench-peers: not found: {', '.join(missing)}", file=sys.stderr)
        return 2
    _, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))
    work = Path(os.environ.setdefault("WORKDIR", str(Path(tempfile.gettempdir()) / "kcoord-bench")))
    work.mkdir(parents=True, exist_ok=True)
    code = 0
    if scenarios:
        (work / "results.jsonl").unlink(missing_ok=True)
        code = measure(script, arguments.only, scenarios)
        subprocess.run([sys.executable, script.parent / "table.py", work / "results.jsonl"], check=False)
    if data_scenarios:
        report, began = Report(), os.getloadavg()[0]
        with tempfile.TemporaryDirectory(dir=work) as folder:
            data_plane.main(shared.resolve(), Path(folder), peers, data_scenarios, report)
        if arguments.document is not None:
            write_into(arguments.document, DOCUMENT_SECTION, _tables(report, began))
    return code


def _tables(report: Report, began: float) -> str:
    """Returns the tables with the command, the date, and the load average before and after the measurement."""
    command = shlex.join(sys.argv[1:]).replace("'", '"')
    load = f"load average {began:.0f} at the beginning and {os.getloadavg()[0]:.0f} at the end"
    head = f"`make bench-peers ARGS='{command}'`,\n{date.today()}, {load}."
    return "\n\n".join([head, *(table.markdown() for table in report.tables)])


def measure(script: Path, only: str, scenarios: list[str]) -> int:
    """Runs the script. Returns its exit code."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        broker = stack.enter_context(Broker(folder / "usual", OS))
        port = _free_port()
        targets = [
            f"kcoord=127.0.0.1:{broker.port}={broker.pid}",
            "--start",
            f"kcoord=127.0.0.1:{port}={_serve(folder / 'life', port)}",
        ]
        code = _run(script, only, scenarios, targets)
        if "join_storm" in scenarios:
            eager = stack.enter_context(Broker(folder / "eager", OS, *NO_INTERVAL))
            target = f"kcoord-interval0=127.0.0.1:{eager.port}={eager.pid}"
            code = _run(script, "", ["join_storm"], [target]) or code
    return code


def _serve(folder: Path, port: int) -> str:
    """Returns the command line of a broker that keeps its data in `folder`."""
    settings = (f"listeners=PLAINTEXT://127.0.0.1:{port}", f"log.dirs={folder}", OS)
    overrides = " ".join(f"--override {setting}" for setting in settings)
    return f"{Path(sys.executable).with_name('kcoord')} serve {overrides}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _run(script: Path, only: str, scenarios: list[str], targets: list[str]) -> int:
    """Runs the script with a session for each generator, since no server may share the session of its client."""
    command = [str(script), "--only", only, "--scenarios", " ".join(scenarios), *targets]
    environment = {"GEN_PREFIX": "setsid", **os.environ}
    return subprocess.run(command, check=False, stdout=subprocess.DEVNULL, env=environment).returncode


if __name__ == "__main__":
    sys.exit(main())
