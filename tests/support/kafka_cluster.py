# SPDX-License-Identifier: Apache-2.0
"""A cluster of several brokers of Apache Kafka from its published jars. Every broker is a controller, too."""

from __future__ import annotations

import signal
import socket
import subprocess
from pathlib import Path

from confluent_kafka.admin import AdminClient

from kcoord_protocol.uuid import uuid_to_string
from tests.support.kafka_broker import START_SECONDS, STOP_SECONDS, start_process
from tests.support.kafka_jars import KafkaJars
from tests.support.ports import free_ports
from tests.support.waiting import wait_until


class KafkaCluster:
    """Running Kafka brokers with the ids from 1 on. Keyword arguments are settings with underscores for dots."""

    def __init__(self, jars: KafkaJars, folder: Path, count: int, *, java_options: str = "", **settings: str) -> None:
        self._jars = jars
        self._java_options = java_options
        self._folder = folder
        self.ports = [free_ports(2) for _ in range(count)]
        voters = ",".join(f"{number}@127.0.0.1:{port + 1}" for number, port in enumerate(self.ports, 1))
        replicas = str(count)
        self._settings = {
            "controller_quorum_voters": voters,
            "default_replication_factor": replicas,
            "offsets_topic_replication_factor": replicas,
            "transaction_state_log_replication_factor": replicas,
            "transaction_state_log_min_isr": str(max(count - 1, 1)),
            "broker_session_timeout_ms": "4000",
            **settings,
        }
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        for number in range(1, count + 1):
            self._format(number)
            self.start(number)
        wait_until(lambda: len(self.brokers()) == count, f"{count} brokers answer; logs: {folder}", START_SECONDS)

    @property
    def address(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self.ports)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def brokers(self) -> list[int]:
        """Returns the ids of the brokers in service, none while no broker answers."""
        for process in self._processes.values():
            assert process.poll() is None, f"a broker of Kafka has ended; logs: {self._folder}"
        try:
            for number in self._processes:
                socket.create_connection(("127.0.0.1", self.ports[number - 1]), 1).close()
        except OSError:
            return []
        return list(AdminClient({"bootstrap.servers": self.address}).list_topics(timeout=10).brokers)

    def _format(self, number: int) -> None:
        """Writes what `kafka-storage format` writes, without starting a JVM for it."""
        logs = self._folder / str(number) / "logs"
        logs.mkdir(parents=True)
        (logs / "meta.properties").write_text(
            f"version=1\ncluster.id={uuid_to_string(b'kcoord-upstream!')}\nnode.id={number}\n"
            f"directory.id={uuid_to_string(b'kcoord-upstream' + bytes([number]))}\n"
        )

    def start(self, number: int) -> None:
        """Starts a broker, also after it was killed."""
        folder = self._folder / str(number)
        overrides = [f"{key.replace('_', '.')}={value}" for key, value in self._settings.items()]
        self._processes[number] = start_process(
            self._jars, folder, self.ports[number - 1], [f"node.id={number}", *overrides], self._java_options
        )

    def kill(self, number: int) -> None:
        """Kills a broker with SIGKILL."""
        process = self._processes.pop(number)
        process.kill()
        process.wait()

    def stop(self) -> None:
        """Stops all brokers."""
        for process in self._processes.values():
            process.send_signal(signal.SIGKILL)
        for process in self._processes.values():
            process.wait(STOP_SECONDS)
