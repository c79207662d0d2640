# SPDX-License-Identifier: Apache-2.0
"""The clients: how each of them is started, and what it has to write."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.clients_before_kafka.copying import CLIENTS as PYTHON
from tests.exactly_once.applications import copy_command, java, streams_command
from tests.exactly_once.checks import Check, check_copied, check_copy, check_counted, check_counts
from tests.exactly_once.work import SOURCE
from tests.support.kafka_jars import TOOLS, KafkaJars
from tests.support.shared import ROOT, missing

_JAVA = Path(__file__).parent / "java" / "ConsumerApplication.java"
_GO = ROOT / "tests" / "clients" / "go"
BUILD_SECONDS = 300


@dataclass(frozen=True, slots=True)
class Client:
    """A program. `checks` are those of the topics that it writes. `command` gets the address and a folder."""

    name: str
    checks: dict[str, Check]
    command: Callable[[str, Path], list[str]]


def _copies(*targets: str) -> dict[str, Check]:
    return dict.fromkeys(targets, check_copied)


def java_consumers(*kinds: str) -> Client:
    targets = [f"java-{kind}" for kind in kinds]
    return Client("java", _copies(*targets), lambda address, _: java(_JAVA, address, SOURCE, *targets))


def java_transactions(protocol: str) -> Client:
    name = f"java-transactions-{protocol}"
    return Client(name, {name: check_copy}, lambda address, _: copy_command(address, name, name, protocol))


def streams(guarantee: str, check: Check) -> Client:
    name = f"streams-{guarantee}"
    return Client(name, {name: check}, lambda address, folder: streams_command(address, name, folder / name, guarantee))


def python(target: str) -> Client:
    module = "tests.clients_before_kafka.copying"
    return Client(target, _copies(target), lambda address, _: [sys.executable, "-m", module, address, SOURCE, target])


def franz_go(folder: Path, protocol: str) -> Client:
    """`folder` gets the program."""
    target, program = f"franz-go-{protocol}", folder / "franz-go"
    if not program.exists():
        go = shutil.which("go")
        if go is None:
            missing("go is not installed")
        subprocess.run([go, "build", "-C", str(_GO), "-o", str(program), "."], check=True, timeout=BUILD_SECONDS)
    return Client(target, _copies(target), lambda address, _: [str(program), address, SOURCE, target])


def console_tools(jars: KafkaJars, protocol: str) -> Client:
    """Kafka's console consumer, which feeds the console producer."""
    name = f"console-{protocol}"

    def command(address: str, _: Path) -> list[str]:
        server = ("--bootstrap-server", address)
        group = ("--group", name, "--from-beginning", "--command-property", f"group.protocol={protocol}")
        consumer = jars.command(TOOLS["console-consumer"], *server, "--topic", SOURCE, *group)
        producer = jars.command(TOOLS["console-producer"], *server, "--topic", name)
        return ["bash", "-c", f"{shlex.join(consumer)} | {shlex.join(producer)}"]

    return Client(name, _copies(name), command)


def some_clients() -> list[Client]:
    """Returns clients that start quickly, and whose sessions last on a busy machine: that of aiokafka is 10 s."""
    return [
        java_consumers("classic", "consumer"),
        *map(python, ("confluent-classic", "confluent-consumer", "kafka-python", "kcoord-client")),
    ]


def all_clients(jars: KafkaJars, folder: Path) -> list[Client]:
    kinds = ("classic", "consumer")
    return [
        java_consumers(*kinds, *(f"{kind}-{way}" for kind in kinds for way in ("regex", "static"))),
        *map(java_transactions, kinds),
        streams("at_least_once", check_counted),
        streams("exactly_once_v2", check_counts),
        *map(python, PYTHON),
        *(franz_go(folder, kind) for kind in kinds),
        *(console_tools(jars, kind) for kind in kinds),
    ]
