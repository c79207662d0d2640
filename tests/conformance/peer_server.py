# SPDX-License-Identifier: Apache-2.0
"""`python tests/conformance/peer_server.py DATA PROPERTIES`: runs kcoord as the server of one of Kafka's own tests.

The properties file has the settings of the test, and `peer.*` facts about the cluster that the test requests. This
script turns the facts into settings of kcoord. Then the process becomes the broker, so signals reach the broker. With
PEER_CONTROL=stdin the process stays the parent of the broker and reads commands from standard input: `stop ID` and
`start ID` for a broker, and `compact`, which needs no action, because kcoord's cleaner runs in any case.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path

RELEASE = "4.3"
"""The release that kcoord behaves like. The suite is that of Kafka 4.3.1."""
FEATURE = "peer.feature."
BROKER = "peer.broker."
PRINCIPAL = "peer.principal."
BOOTSTRAP_FEATURES = ("group.version", "transaction.version")


def main(arguments: list[str]) -> None:
    data, properties = arguments
    facts = read_facts(Path(properties).read_text(encoding="latin-1"))
    overrides = [f"log.dirs={data}", f"kcoord.release={RELEASE}", *settings(facts)]
    command = [sys.executable, "-m", "kcoord", "serve", properties]
    for override in overrides:
        command += ["--override", override]
    if os.environ.get("PEER_CONTROL") == "stdin":
        sys.exit(Control(command, data, int(facts["peer.brokers"])).run())
    os.execv(sys.executable, command)


class Control:
    """The broker as a child process, and the commands for it.

    `stop` and `start` of the only broker end and start the process. With several workers they fence and unfence one of
    them.
    """

    def __init__(self, command: list[str], data: str, brokers: int) -> None:
        self._command = command
        self._data = data
        self._brokers = brokers
        self._is_ending = False
        self._is_stopped = threading.Event()
        self._is_started = threading.Event()
        self._process = self._spawn()

    def _spawn(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, stdin=subprocess.DEVNULL)

    def run(self) -> int:
        """Runs until SIGTERM, or until the broker ends by itself. Returns the broker's exit code."""
        signal.signal(signal.SIGTERM, self._end)
        threading.Thread(target=self._read_commands, daemon=True).start()
        while True:
            process = self._process
            code = process.wait()
            if self._is_ending or not self._wait_for_next(process):
                return code

    def _wait_for_next(self, ended: subprocess.Popen[bytes]) -> bool:
        """Waits for the next start if `stop` has ended the broker. Returns whether another process was started."""
        if not self._is_stopped.is_set():
            return False
        self._is_started.wait()
        return self._process is not ended

    def _end(self, *_: object) -> None:
        self._is_ending = True
        self._is_started.set()
        self._process.terminate()

    def _read_commands(self) -> None:
        for line in sys.stdin:
            action, _, number = line.strip().partition(" ")
            if action == "stop":
                self._stop(number)
            elif action == "start":
                self._start(number)
            print("peer: done", flush=True)

    def _stop(self, number: str) -> None:
        if self._brokers > 1:
            self._workers("fence", number)
            return
        self._is_started.clear()
        self._is_stopped.set()
        self._process.terminate()
        self._process.wait()

    def _start(self, number: str) -> None:
        if self._brokers > 1:
            self._workers("unfence", number)
            return
        self._process = self._spawn()
        self._is_stopped.clear()
        self._is_started.set()

    def _workers(self, action: str, number: str) -> None:
        command = [sys.executable, "-m", "kcoord", "workers", action, number, "--data", self._data]
        subprocess.run(command, check=True)


def read_facts(properties: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in properties.splitlines() if line.startswith("peer."))


def settings(facts: Mapping[str, str]) -> list[str]:
    """Returns kcoord's settings for the facts. Facts about listeners and roles that kcoord has anyway are ignored."""
    levels = [f"{name}={facts[FEATURE + name]}" for name in BOOTSTRAP_FEATURES if FEATURE + name in facts]
    features = [f"kcoord.bootstrap.features={','.join(levels)}"] if levels else []
    principals = [
        f"{name.removeprefix(PRINCIPAL)}={value}" for name, value in facts.items() if name.startswith(PRINCIPAL)
    ]
    fixed = [f"kcoord.listener.principals={','.join(principals)}"] if principals else []
    return features + fixed + _settings_of_brokers(facts, int(facts["peer.brokers"]))


def _settings_of_brokers(facts: Mapping[str, str], count: int) -> list[str]:
    """Returns the settings of workers, which stand for several brokers.

    Settings of a controller apply to all workers, since one worker is the controller.
    """
    lines = []
    if count > 1:
        ports = [facts[f"peer.listeners.{number}"].split(",")[0].rpartition(":")[2] for number in range(count)]
        lines.append(f"kcoord.worker.ports={','.join(ports)}")
    for name, value in facts.items():
        number, _, key = name.removeprefix(BROKER).partition(".")
        if name.startswith(BROKER):
            lines.append(f"kcoord.worker.{number}.{key}={value}" if int(number) < count else f"{key}={value}")
    return lines


if __name__ == "__main__":
    main(sys.argv[1:])
