# SPDX-License-Identifier: Apache-2.0
"""`kcoord simulate`: the deterministic simulation of the coordinator; a seed is all that a run depends on."""

from __future__ import annotations

from kcoord.simulation.runner import main

__all__ = ["main"]
