# SPDX-License-Identifier: Apache-2.0
"""Properties files for Kafka's tools and kcoord's commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_properties(path: Path, properties: Mapping[str, str]) -> str:
    """Writes the file and returns its path, for a command line."""
    path.write_text("".join(f"{key}={value}\n" for key, value in properties.items()))
    return str(path)
