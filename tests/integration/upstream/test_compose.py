# SPDX-License-Identifier: Apache-2.0
"""docker/compose-upstream.yaml and the commands of docs/guides/operate-instances.md, without containers.

The processes have the settings and the commands of the file. Only hosts, ports and folders differ. In the short form
three workers of kcoord take the place of the brokers, which `make failover` runs.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml  # type: ignore[import-untyped]

from tests.docs.shell import shell_commands
from tests.docs.terminal import blocks_of
from tests.support.kafka_cluster import KafkaCluster
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess
from tests.support.ports import free_ports
from tests.support.shared import ROOT
from tests.support.waiting import wait_until

FILE = "docker/compose-upstream.yaml"
PAGE = ROOT / "docs" / "guides" / "operate-instances.md"
COMPOSE = ["docker", "compose", "-f", FILE]
SERVICES = yaml.safe_load((ROOT / FILE).read_text())["services"]
KAFKA = [name for name in SERVICES if name.startswith("kafka-")]
KCOORD = [name for name in SERVICES if name.startswith("kcoord-")]
OF_CONTAINERS = {
    "KAFKA_ADVERTISED_LISTENERS",
    "KAFKA_CONTROLLER_QUORUM_VOTERS",
    "KAFKA_LISTENERS",
    "KAFKA_LOG_DIRS",
    "KAFKA_NODE_ID",
}
"""The settings with names and folders of containers."""


def is_long() -> bool:
    return os.environ.get("FAILOVER") == "long"


class Services:
    """The services of the file as processes on this machine."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        settings = {
            key.removeprefix("KAFKA_").lower(): text
            for key, text in SERVICES[KAFKA[0]]["environment"].items()
            if key.startswith("KAFKA_") and key not in OF_CONTAINERS
        }
        self._brokers: KafkaCluster | KcoordProcess
        if is_long():
            release = SERVICES[KAFKA[0]]["image"].partition(":")[2]
            self._brokers = KafkaCluster(KafkaJars(release), folder / "kafka", len(KAFKA), **settings)
        else:
            keys = {key.replace("_", "."): text for key, text in settings.items()}
            (folder / "kafka").mkdir()
            workers = {"group.coordinator.threads": str(len(KAFKA)), "node.id": "1"}
            self._brokers = KcoordProcess(folder / "kafka", {**keys, **workers}).start()
        self._addresses = {
            f"{name}:9092": f"127.0.0.1:{port}" for name, port in zip(KAFKA, self._brokers.ports, strict=True)
        }
        self._addresses |= {f"{name}:9092": f"127.0.0.1:{free_ports(2)}" for name in KCOORD}
        self.kcoord = {name: self._instance(name) for name in KCOORD}
        self._application: subprocess.Popen[bytes] | None = None
        self._output = folder / "billing.txt"
        self.pipe = ""
        """What the next command reads."""
        self.sent: list[str] = []
        """The orders that were produced."""

    def _here(self, text: str) -> str:
        """Returns a text with the addresses of this machine."""
        return re.sub(r"[\w-]+:9092", lambda address: self._addresses.get(address[0], address[0]), text)

    def _instance(self, name: str) -> KcoordProcess:
        (self._folder / name).mkdir()
        # Each container has a host of its own. Here they share one, so these ports have to differ.
        process = KcoordProcess(
            self._folder / name,
            {"kcoord.upstream.ports": "0", "kcoord.metrics.port": "0", "kcoord.metrics.host": "127.0.0.1"},
        )
        environment = SERVICES[name]["environment"]
        process.environment = {key: self._here(text) for key, text in environment.items()}
        process.ports = [int(self._addresses[f"{name}:9092"].rpartition(":")[2])]
        return process

    def up(self) -> None:
        for process in self.kcoord.values():
            process.start()
        with self._output.open("wb") as output:
            command = [self._here(word) for word in SERVICES["billing"]["command"]]
            self._application = subprocess.Popen([sys.executable, "-m", "kcoord", *command], stdout=output)

    def consumed(self) -> list[str]:
        """Returns what the application has printed."""
        return self._output.read_text().splitlines()

    def run(self, service: str, command: list[str]) -> str:
        """Runs a command in a container of kcoord, where its port is at the default address. It reads the pipe."""
        assert command[0] == "kcoord"
        arguments = [*command[1:], "--bootstrap-server", self.kcoord[service].address]
        done = subprocess.run(
            [sys.executable, "-m", "kcoord", *arguments], input=self.pipe, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done
        self.pipe = ""
        return done.stdout

    def stop(self) -> None:
        if self._application is not None:
            self._application.terminate()
            self._application.wait()
        for process in self.kcoord.values():
            process.kill()
        self._brokers.stop()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    services = Services(tmp_path)
    yield services
    services.stop()


def page_of(process: KcoordProcess, name: str) -> str:
    page = re.findall(r"Metrics are at (http://.*)/metrics", process.log)[-1]
    with urlopen(f"{page}/{name}") as answer:
        text: str = answer.read().decode()
    return text


def test_brokers_and_instances_know_each_other() -> None:
    voters = ",".join(f"{number}@{name}:9093" for number, name in enumerate(KAFKA, 1))
    for number, name in enumerate(KAFKA, 1):
        environment = SERVICES[name]["environment"]
        assert environment["KAFKA_CONTROLLER_QUORUM_VOTERS"] == voters
        assert environment["KAFKA_NODE_ID"] == str(number)
        assert environment["KAFKA_ADVERTISED_LISTENERS"] == f"PLAINTEXT://{name}:9092"
    for name in KCOORD:
        environment = SERVICES[name]["environment"]
        assert environment["KCOORD_UPSTREAM_BOOTSTRAP_SERVERS"] == ",".join(f"{broker}:9092" for broker in KAFKA)
        assert environment["KCOORD_ADVERTISED_LISTENERS"] == f"PLAINTEXT://{name}:9092"
    assert len({SERVICES[name]["environment"]["KCOORD_NODE_ID"] for name in KCOORD}) == len(KCOORD)


def play(services: Services, words: list[str]) -> None:
    """Runs a command of the guide, or does with processes what it does with containers."""
    if words[0] == "printf":
        services.pipe = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        services.sent += services.pipe.splitlines()
        return
    assert words[: len(COMPOSE)] == COMPOSE
    match words[len(COMPOSE) :]:
        case ["up", *_]:
            services.up()
        case ["exec", "-T", service, *command] | ["exec", service, *command]:
            output = services.run(service, command)
            assert "upstream" not in command or "1000001" in output
        case ["logs", "billing"]:
            wait_until(lambda: sorted(services.consumed()) == sorted(services.sent), "billing has consumed all orders")
        case ["stop", service]:
            process = services.kcoord[service]
            assert (page_of(process, "ready"), page_of(process, "health")) == ("ready\n", "healthy\n")
            assert process.stop() == 0
        case ["start", service]:
            services.kcoord[service].start()
        case ["down", *_]:
            services.stop()
        case other:
            pytest.fail(f"no counterpart of {other}")


def test_the_guide_works_without_containers(services: Services) -> None:
    scripts = [block.text for block in blocks_of(PAGE.read_text()) if block.language == "sh" and FILE in block.text]
    assert scripts
    for script in scripts:
        for command in shell_commands(script):
            play(services, command.words)
