# SPDX-License-Identifier: Apache-2.0
"""`python tests/conformance/peer_server.py DATA PROPERTIES`: kcoord as the server of one of Kafka's integration tests.

The properties file holds what the test sets, and `peer.*` facts about the cluster that it wants; the facts become
settings of ours. The process becomes the broker itself, so signals reach it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from pathlib import Path

FEATURE = "peer.feature."
BROKER = "peer.broker."
BOOTSTRAP_FEATURES = ("group.version", "transaction.version")
RACK = "broker.rack"


def main(arguments: list[str]) -> None:
    data, properties = arguments
    facts = read_facts(Path(properties).read_text(encoding="latin-1"))
    overrides = [f"log.dirs={data}", *settings(facts)]
    command = [sys.executable, "-m", "kcoord", "serve", properties]
    for override in overrides:
        command += ["--override", override]
    os.execv(sys.executable, command)


def read_facts(properties: str) -> dict[str, str]:
    return dict(line.split("=", 1) for line in properties.splitlines() if line.startswith("peer."))


def settings(facts: Mapping[str, str]) -> list[str]:
    """Our settings for the facts. Those about listeners and layout say what we are anyway."""
    levels = [f"{name}={facts[FEATURE + name]}" for name in BOOTSTRAP_FEATURES if FEATURE + name in facts]
    features = [f"kcoord.bootstrap.features={','.join(levels)}"] if levels else []
    return features + _settings_of_brokers(facts, int(facts["peer.brokers"]))


def _settings_of_brokers(facts: Mapping[str, str], count: int) -> list[str]:
    """Several brokers are workers. What is set for single brokers or controllers is set for all; racks differ."""
    found = []
    if count > 1:
        ports = [facts[f"peer.listeners.{number}"].split(",")[0].rpartition(":")[2] for number in range(count)]
        found.append(f"kcoord.worker.ports={','.join(ports)}")
    racks = [facts.get(f"{BROKER}{number}.{RACK}") for number in range(count)]
    if all(racks):
        found.append(f"kcoord.worker.racks={','.join(rack or '' for rack in racks)}")
    own = {
        name.removeprefix(BROKER).partition(".")[2]: value for name, value in facts.items() if name.startswith(BROKER)
    }
    return found + [f"{key}={value}" for key, value in own.items() if key != RACK]


if __name__ == "__main__":
    main(sys.argv[1:])
