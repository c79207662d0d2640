# SPDX-License-Identifier: Apache-2.0
"""`make docker-spark-test`: builds the image of the pipeline, and runs a lake on a cluster of its containers.

Usage: spark_image.py IMAGE. A master and two workers are containers, and so is the driver of each job, which is the one
of docs/guides/pipeline-on-a-cluster.md. tests/docker/container.py says which daemon and base image are used.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from confluent_kafka import ConsumerGroupTopicPartitions, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.docker.container import build, docker, run_checks
from tests.support.confluent import create_topic
from tests.support.kcoord_process import KcoordProcess

GROUPS = 40
PARTITIONS = 5
READY_SECONDS = 120.0

Offsets = dict[tuple[str, int], int]


def write_log(folder: Path) -> Offsets:
    """Lets a broker write a log of committed offsets. Returns the last ones."""
    broker = KcoordProcess(folder).start()
    try:
        create_topic(broker.address, "orders", PARTITIONS)
        admin = AdminClient({"bootstrap.servers": broker.address})
        offsets: Offsets = {}
        for group in range(GROUPS):
            places = [TopicPartition("orders", number, 100 * group + number) for number in range(PARTITIONS)]
            request = ConsumerGroupTopicPartitions(f"g{group}", places)
            admin.alter_consumer_group_offsets([request])[f"g{group}"].result(30)
            offsets |= {(f"g{group}", place.partition): place.offset for place in places}
    finally:
        broker.stop()
    return offsets


class Cluster:
    """Containers in a network of their own. All of them have the log at /log, and lakes in /lakes."""

    def __init__(self, image: str, folder: Path, at_end: ExitStack) -> None:
        self._image = image
        self._at_end = at_end
        self._network = f"kcoord-spark-{uuid.uuid4().hex[:8]}"
        self._options = ["--network", self._network, "--volume", f"{folder}/log:/log:ro"]
        self._options += ["--volume", f"{folder}/lakes:/lakes"]
        docker("network", "create", self._network)
        at_end.callback(docker, "network", "rm", self._network, check=False)

    def start(self, name: str, *command: str) -> str:
        """Starts a container whose host name in the network is `name`. Returns the container's name."""
        container = f"{self._network}-{name}"
        docker("run", "--detach", "--name", container, "--hostname", name, "--network-alias", name, *self._options,
               self._image, *command)  # fmt: skip
        self._at_end.callback(docker, "rm", "--force", container, check=False)
        return container

    def run(self, *command: str) -> str:
        """Runs a command in a container. Returns its output."""
        return docker("run", "--rm", "--hostname", "driver", "--network-alias", "driver", *self._options, self._image,
                      *command)  # fmt: skip

    def submit(self, *arguments: str) -> str:
        file = "/opt/kcoord/lib/python3*/site-packages/kcoord/cli/submit/lake.py"
        script = f'exec spark-submit --master spark://master:7077 {file} "$@"'
        return self.run("bash", "-c", script, "lake", *arguments)


@contextmanager
def running(image: str) -> Iterator[tuple[Cluster, list[str], Offsets]]:
    """Yields a cluster, its two workers, and the offsets in the log."""
    with ExitStack() as at_end:
        folder = Path(at_end.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
        (folder / "broker").mkdir()
        offsets = write_log(folder / "broker")
        shutil.copytree(KcoordProcess(folder / "broker").data, folder / "log")
        (folder / "lakes").mkdir()
        # The containers run as another user.
        for path in (folder, *(folder / "log").rglob("*"), folder / "log", folder / "lakes"):
            path.chmod(0o777)
        cluster = Cluster(image, folder, at_end)
        master = cluster.start("master", "spark-class", "org.apache.spark.deploy.master.Master", "--host", "master")
        worker = ("org.apache.spark.deploy.worker.Worker", "--cores", "1", "--memory", "1g", "spark://master:7077")
        workers = [cluster.start(f"worker{number}", "spark-class", *worker) for number in (1, 2)]
        wait_until(lambda: log_of(master).count("Registering worker") == len(workers), "the workers are registered")
        yield cluster, workers, offsets


def log_of(container: str) -> str:
    """Returns what a container has printed. Spark's log is on stderr."""
    command = ["docker", "logs", container]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True).stdout


def wait_until(is_true: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + READY_SECONDS
    while not is_true():
        assert time.monotonic() < deadline, f"not true: {what}"
        time.sleep(0.5)


def check_cluster(image: str) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yields names and checks. Each check relies on the checks before it."""
    with running(image) as (cluster, workers, offsets):
        yield "does not run as root", lambda: docker("exec", workers[0], "id", "-u") != "0"
        copy = ("ingest", "--log", "/log", "--lake", "/lakes/delta", "--format", "delta")
        yield "a cluster of containers copies a log", lambda: cluster.submit(*copy) is not None
        yield "both workers have started executors", lambda: all(has_executors(worker) for worker in workers)
        yield "a container has the answers", lambda: current(cluster, "/lakes/delta", "--format", "delta") == offsets
        docker("kill", "--signal", "KILL", workers[0])
        yield "a job ends with one worker", lambda: cluster.submit("compact", *copy[3:], "--grace", "0") is not None
        yield "the lake is the same", lambda: current(cluster, "/lakes/delta", "--format", "delta") == offsets
        report = ("--log", "/log", "--lake", "/lakes/local", "--output", "/lakes/report.html", "--json")
        yield "a report needs no cluster", lambda: "size_bytes" in cluster.run("kcoord", "lake", "report", *report)


def has_executors(worker: str) -> bool:
    return "ExecutorRunner: Launch command" in log_of(worker)


def current(cluster: Cluster, lake: str, *options: str) -> Offsets:
    rows = json.loads(cluster.run("kcoord", "lake", "current", "--lake", lake, *options, "--json", "--limit", "1000"))
    return {(row["group"], row["partition"]): row["committed_offset"] for row in rows["current_offsets"]}


def main() -> int:
    image = sys.argv[1]
    build(image, "docker/spark.Dockerfile")
    return run_checks(check_cluster(image))


if __name__ == "__main__":
    sys.exit(main())
