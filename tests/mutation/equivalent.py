# SPDX-License-Identifier: Apache-2.0
"""The list of equivalent mutants (equivalent.toml): mutants that change nothing that a test could observe."""

from __future__ import annotations

import tomllib
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from tests.mutation.mutants import ROOT, Mutant, mutants_of

_LIST = Path(__file__).parent / "equivalent.toml"


@dataclass(frozen=True, slots=True)
class EquivalentMutant:
    """An entry of equivalent.toml."""

    file: str
    line: str
    change: str
    reason: str

    @property
    def key(self) -> tuple[str, str, str]:
        return self.file, self.line, self.change


def read_equivalent_mutants() -> list[EquivalentMutant]:
    return [EquivalentMutant(**entry) for entry in tomllib.loads(_LIST.read_text()).get("mutant", [])]


def key_of(mutant: Mutant) -> tuple[str, str, str]:
    return mutant.file, mutant.line_text, mutant.change


def outdated(entries: Collection[EquivalentMutant]) -> list[EquivalentMutant]:
    """Returns the entries that match no mutant of the current code."""
    files = {entry.file for entry in entries if (ROOT / entry.file).exists()}
    keys = {key_of(mutant) for file in files for mutant in mutants_of(file, (ROOT / file).read_text())}
    return [entry for entry in entries if entry.key not in keys]
