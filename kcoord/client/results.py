# SPDX-License-Identifier: Apache-2.0
"""Results of calls about several things, each of which succeeds or fails by itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from kcoord_protocol.errors import Errors, KafkaError

K = TypeVar("K")
V = TypeVar("V")


class Results(Generic[K, V]):
    """`results[key]` is the value, or raises the error of that key; `all()` is all, or raises the first error."""

    def __init__(self, outcomes: Mapping[K, V | KafkaError]) -> None:
        self._outcomes = dict(outcomes)

    def __getitem__(self, key: K) -> V:
        outcome = self._outcomes[key]
        if isinstance(outcome, KafkaError):
            raise outcome
        return outcome

    def __iter__(self) -> Iterator[K]:
        return iter(self._outcomes)

    def __len__(self) -> int:
        return len(self._outcomes)

    def __contains__(self, key: object) -> bool:
        return key in self._outcomes

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._outcomes!r})"

    @property
    def values(self) -> dict[K, V]:
        """What succeeded."""
        return {key: each for key, each in self._outcomes.items() if not isinstance(each, KafkaError)}

    @property
    def errors(self) -> dict[K, KafkaError]:
        """What failed."""
        return {key: each for key, each in self._outcomes.items() if isinstance(each, KafkaError)}

    def error(self, key: K) -> KafkaError | None:
        """Why `key` failed, None where it did not."""
        outcome = self._outcomes[key]
        return outcome if isinstance(outcome, KafkaError) else None

    def all(self) -> dict[K, V]:
        """Every value, or the first error."""
        return {key: self[key] for key in self._outcomes}


def outcome_of(code: int, message: str | None, value: V) -> V | KafkaError:
    """The value, or the error that the code names."""
    return value if code == Errors.NONE else KafkaError(error_of(code), message)


def error_of(code: int) -> Errors:
    """The error; a code that is newer than this client is an unknown server error."""
    try:
        return Errors(code)
    except ValueError:
        return Errors.UNKNOWN_SERVER_ERROR
