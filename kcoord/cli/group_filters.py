# SPDX-License-Identifier: Apache-2.0
"""Which groups `kcoord consumer-groups --list` shows: the values of --state and --type, in Kafka's spelling."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Final

_STATES: Final = ("PreparingRebalance", "CompletingRebalance", "Stable", "Empty", "Dead", "Assigning", "Reconciling")
_STATES_BY_NAME: Final = {state.lower(): state for state in _STATES}
_TYPES_BY_NAME: Final = {"consumer": "Consumer", "classic": "Classic", "generic": "Classic"}
"""`generic` is the name that KIP-848 had for classic groups."""


def states_of(options: argparse.Namespace) -> list[str]:
    """Returns the states to list; none means all. ValueError for a state that does not exist."""
    return _chosen("state", options.state, _STATES_BY_NAME)


def types_of(options: argparse.Namespace) -> list[str]:
    """Returns the types to list; none means all. ValueError for a type that does not exist."""
    return _chosen("type", options.type, _TYPES_BY_NAME)


def _chosen(what: str, text: str | None, known: Mapping[str, str]) -> list[str]:
    chosen = []
    for name in (text or "").replace(" ", "").split(","):
        if name and name.lower() not in known:
            raise ValueError(f"{name} is no {what}; there are {', '.join(sorted(set(known.values())))}")
        if name:
            chosen.append(known[name.lower()])
    return chosen
