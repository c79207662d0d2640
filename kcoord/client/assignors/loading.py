# SPDX-License-Identifier: Apache-2.0
"""Makes the assignors that the setting `group_local_assignors` names."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias

from kcoord.client.assignors import CLASSIC_VERSION, PartitionAssignor
from kcoord.client.errors import ConfigException

LocalAssignor: TypeAlias = PartitionAssignor | type[PartitionAssignor] | str
"""An object, a class, a text `package.module:Class`, or the name of an entry point."""

ENTRY_POINTS: Final = "kcoord.client_assignors"
_HIGHEST_VERSION: Final = 32_767
_SETTING: Final = "group_local_assignors"


def load_assignors(assignors: str | Iterable[LocalAssignor]) -> list[PartitionAssignor]:
    """Returns the objects of the assignors, in order. A text has several names, separated by commas.

    Raises ConfigException if an assignor cannot be loaded or has no valid name and versions, or if two have one name.
    """
    chosen: Iterable[LocalAssignor] = assignors
    if isinstance(assignors, str):
        chosen = [name.strip() for name in assignors.split(",") if name.strip()]
    objects = [_load(assignor) for assignor in chosen]
    _check(objects)
    return objects


def _load(assignor: LocalAssignor) -> PartitionAssignor:
    if isinstance(assignor, PartitionAssignor):
        return assignor
    kind: object = _import(assignor) if isinstance(assignor, str) else assignor
    if not (isinstance(kind, type) and issubclass(kind, PartitionAssignor)):
        raise ConfigException(f"{_SETTING}: {assignor!r} is not a subclass of kcoord.client.PartitionAssignor")
    try:
        return kind()
    except Exception as error:
        raise ConfigException(f"{_SETTING}: {assignor!r} cannot be created without arguments: {error}") from error


def _import(name: str) -> object:
    module, colon, attribute = name.partition(":")
    try:
        if colon:
            return getattr(importlib.import_module(module), attribute)
        # Importing it takes a tenth of the start of a command.
        from importlib.metadata import entry_points

        candidates = list(entry_points(group=ENTRY_POINTS, name=name))
        if candidates:
            return candidates[0].load()
    except Exception as error:
        raise ConfigException(f"{_SETTING}: {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
    raise ConfigException(
        f"{_SETTING}: {name!r} is neither package.module:Class nor an entry point of the group {ENTRY_POINTS}"
    )


def _check(assignors: Sequence[PartitionAssignor]) -> None:
    """Checks what the coordinator would reject with INVALID_REQUEST."""
    names: set[object] = set()
    for assignor in assignors:
        name: object = assignor.name
        if not isinstance(name, str) or not name.strip():
            raise ConfigException(f"{_SETTING}: {type(assignor).__name__} has the name {name!r}; it must not be blank")
        if name in names:
            raise ConfigException(f"{_SETTING}: two assignors have the name {name!r}")
        names.add(name)
        lowest, highest = assignor.minimum_version, assignor.maximum_version
        if not CLASSIC_VERSION <= lowest <= highest <= _HIGHEST_VERSION or highest < 0:
            raise ConfigException(
                f"{_SETTING}: {name!r} has the versions {lowest} to {highest}; the lowest must be at least -1, the "
                f"highest at least 0 and at most {_HIGHEST_VERSION}"
            )
