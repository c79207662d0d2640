# SPDX-License-Identifier: Apache-2.0
"""The values of --state and --type of `kcoord consumer-groups --list`, in Kafka's spelling."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Final

_STATES: Final = ("PreparingRebalance", "CompletingRebalance", "Stable", "Empty", "Dead", "Assigning", "Reconciling")
_STATES_BY_NAME: Final = {state.lower(): state for state in _STATES}
_TYPES_BY_NAME: Final = {"consumer": "Consumer", "classic": "Classic", "generic": "Classic"}
"""`generic` is the name that KIP-848 had for classic groups."""


def states_of(options: argparse.Namespace) -> list[str]:
    """Returns the states to list; an empty list means all. Raises ValueError for an unknown state."""
    return _chosen("state", options.state, _STATES_BY_NAME)


def types_of(options: argparse.Namespace) -> list[str]:
    """Returns the types to list; an empty list means all. Raises ValueError for an unknown type."""
    return _chosen("type", options.type, _TYPES_BY_NAME)


def _chosen(what: str, text: str | None, names: Mapping[str, str]) -> list[str]:
    chosen = []
    for name in (text or "").replace(" ", "").split(","):
        if name and name.lower() not in names:
            raise ValueError(f"unknown {what} {name}: it must be one of {', '.join(sorted(set(names.values())))}")
        if name:
            chosen.append(names[name.lower()])
    return chosen
