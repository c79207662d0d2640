# SPDX-License-Identifier: Apache-2.0
"""A single-node broker of Apache Kafka from its published jars, on free ports."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

from confluent_kafka.admin import AdminClient

from tests.support.java import QUICK_START
from tests.support.kafka_jars import VERSION, KafkaJars
from tests.support.shared import shared
from tests.support.waiting import wait_until

START_SECONDS = 90.0
STOP_SECONDS = 30.0


class KafkaBroker:
    """A running Kafka broker.

    Its data is under `folder / "logs"`, which may already have data. Keyword arguments are settings with underscores
    for dots. `{port}` and `{controller_port}` stand for the ports.
    """

    def __init__(self, jars: KafkaJars, folder: Path, **settings: str) -> None:
        script = shared("anchors", "kafka", "run.sh")
        self._folder = folder
        self.data = folder / "logs"
        self.sasl_address = ""
        """The address of a further listener with SASL, for the test that configures one."""
        self.port = free_port_pair()
        work = folder / "work"
        # The script reads the class path of a version from this folder.
        path = work if jars.version == VERSION else folder / f"work-{jars.version}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "cp.txt").write_text(jars.class_path)
        ports = {"{port}": str(self.port), "{controller_port}": str(self.port + 1)}
        overrides = []
        for key, value in settings.items():
            for name, port in ports.items():
                value = value.replace(name, port)
            overrides.append(f"{key.replace('_', '.')}={value}")
        with (folder / "kafka.log").open("wb") as log:
            self._process = subprocess.Popen(
                ["bash", str(script), str(self.port), str(folder), *overrides],
                env={
                    **os.environ,
                    "KAFKA": jars.version,
                    "WORK": str(work),
                    "KAFKA_HEAP_OPTS": f"-Xms128m -Xmx384m {QUICK_START}",
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        wait_until(self._is_up, f"Kafka answers; its log: {folder / 'kafka.log'}", START_SECONDS)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _is_up(self) -> bool:
        assert self._process.poll() is None, (self._folder / "kafka.log").read_text()[-4000:]
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return bool(AdminClient({"bootstrap.servers": self.address}).list_topics(timeout=10).brokers)

    def stop(self) -> None:
        """Stops the broker with SIGTERM. Further calls do nothing."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def free_port_pair() -> int:
    """Returns the first of two consecutive free ports. The controller listens on the second."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", 0))
            port: int = first.getsockname()[1]
            try:
                second.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
