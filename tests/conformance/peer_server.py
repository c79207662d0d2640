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
BOOTSTRAP_FEATURES = ("group.version", "transaction.version")
SEVERAL_BROKERS = 3
"""The exit code where the test wants several brokers: it fails at once then."""


def main(arguments: list[str]) -> None:
    data, properties = arguments
    facts = read_facts(Path(properties).read_text(encoding="latin-1"))
    if facts["peer.brokers"] != "1":
        sys.exit(SEVERAL_BROKERS)
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
    return [f"kcoord.bootstrap.features={','.join(levels)}"] if levels else []


if __name__ == "__main__":
    main(sys.argv[1:])
