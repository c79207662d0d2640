# SPDX-License-Identifier: Apache-2.0
"""A single-node broker of Apache Kafka from its published jars, on free ports."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from kcoord_protocol.uuid import uuid_to_string
from tests.support.class_archives import archive_options, cache_folder, only_one_makes
from tests.support.java import QUICK_START
from tests.support.kafka_jars import VERSION, KafkaJars
from tests.support.ports import free_ports
from tests.support.shared import shared
from tests.support.waiting import wait_until

START_SECONDS = 90.0
STOP_SECONDS = 30.0
_DUMP_SECONDS = 300.0
"""Bounds the end of a broker that writes an archive of its classes."""
_JAVA_OPTIONS = f"-Xms128m -Xmx384m {QUICK_START}"


class KafkaBroker:
    """A running Kafka broker.

    Its data is under `folder / "logs"`, which may already have data. Keyword arguments are settings with underscores
    for dots. `{port}` and `{controller_port}` stand for the ports.
    """

    def __init__(self, jars: KafkaJars, folder: Path, *, java_options: str = "", **settings: str) -> None:
        self.data = folder / "logs"
        self.sasl_address = ""
        """The address of a further listener with SASL, for the test that configures one."""
        if not (self.data / "meta.properties").exists():
            _format(jars, self.data)
        self.port = free_ports(2)
        overrides = []
        for key, value in settings.items():
            for name, port in {"{port}": self.port, "{controller_port}": self.port + 1}.items():
                value = value.replace(name, str(port))
            overrides.append(f"{key.replace('_', '.')}={value}")
        self._process = start_process(jars, folder, self.port, overrides, java_options)
        wait_until(self._is_up, f"Kafka answers; its log: {folder / 'kafka.log'}", START_SECONDS)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _is_up(self) -> bool:
        assert self._process.poll() is None, (self.data.parent / "kafka.log").read_text()[-4000:]
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
            return bool(AdminClient({"bootstrap.servers": self.address}).list_topics(timeout=10).brokers)
        except (OSError, KafkaException):
            return False

    def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Stops the broker with SIGTERM, and with SIGKILL after `seconds`. Further calls do nothing."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(seconds)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def start_process(
    jars: KafkaJars, folder: Path, port: int, overrides: Sequence[str], java_options: str = ""
) -> subprocess.Popen[bytes]:
    """Starts a broker with its log in `folder / "kafka.log"`. By default it uses an archive of classes."""
    work = folder / "work"
    # The script reads the class path of a version from this folder.
    path = work if jars.version == VERSION else folder / f"work-{jars.version}"
    path.mkdir(parents=True, exist_ok=True)
    (path / "cp.txt").write_text(jars.class_path)
    options = java_options or f"{_JAVA_OPTIONS} {_archive_options(jars)}"
    with (folder / "kafka.log").open("ab") as log:
        return subprocess.Popen(
            ["bash", str(shared("anchors", "kafka", "run.sh")), str(port), str(folder), *overrides],
            env={**os.environ, "KAFKA": jars.version, "WORK": str(work), "KAFKA_HEAP_OPTS": options},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _archive_options(jars: KafkaJars) -> str:
    if jars.version != VERSION:
        return ""  # Few tests start other versions, so an archive would not pay.

    def dump(options: str) -> None:
        with tempfile.TemporaryDirectory() as folder:
            broker = KafkaBroker(jars, Path(folder), java_options=f"{_JAVA_OPTIONS} {options}")
            broker.stop(_DUMP_SECONDS)
            assert broker._process.returncode != -signal.SIGKILL, "the archive of its classes may be half written"

    return archive_options("kafka-broker", "java", QUICK_START, jars.class_path, dump)


def _format(jars: KafkaJars, logs: Path) -> None:
    """Writes what `kafka-storage format` writes. The tool runs once for each version of Kafka, because it takes 2 s."""
    formatted = cache_folder() / f"kafka-{jars.version}-formatted"
    with only_one_makes(formatted.name):
        if not formatted.exists():
            with tempfile.TemporaryDirectory(dir=cache_folder()) as folder:
                _run_format(jars, Path(folder))
                Path(folder, "logs").rename(formatted)
    shutil.copytree(formatted, logs, dirs_exist_ok=True)
    cluster_id, directory_id = (uuid_to_string(os.urandom(16)) for _ in range(2))
    (logs / "meta.properties").write_text(
        f"version=1\ncluster.id={cluster_id}\nnode.id=1\ndirectory.id={directory_id}\n"
    )


def _run_format(jars: KafkaJars, folder: Path) -> None:
    properties = folder / "server.properties"
    properties.write_text(
        "process.roles=broker,controller\nnode.id=1\ncontroller.quorum.voters=1@127.0.0.1:9093\n"
        "listeners=PLAINTEXT://127.0.0.1:9092,CONTROLLER://127.0.0.1:9093\ncontroller.listener.names=CONTROLLER\n"
        f"log.dirs={folder / 'logs'}\n"
    )
    cluster_id = uuid_to_string(bytes(range(16)))  # a random one may begin with "-", like an option
    command = jars.command("kafka.tools.StorageTool", "format", "-t", cluster_id, "-c", str(properties))
    subprocess.run(command, capture_output=True, check=True, timeout=START_SECONDS)
