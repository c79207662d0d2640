# SPDX-License-Identifier: Apache-2.0
"""Results of calls about several keys. Each key succeeds or fails by itself. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from kcoord_protocol.errors import Errors, KafkaError

K = TypeVar("K")
V = TypeVar("V")


class Results(Generic[K, V]):
    """The outcomes of a call, by key.

    `results[key]` returns the value of a key or raises its error. `all()` returns all values or raises the first error.
    """

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
        """The values of the keys that succeeded."""
        return {key: outcome for key, outcome in self._outcomes.items() if not isinstance(outcome, KafkaError)}

    @property
    def errors(self) -> dict[K, KafkaError]:
        """The errors of the keys that failed."""
        return {key: outcome for key, outcome in self._outcomes.items() if isinstance(outcome, KafkaError)}

    def error(self, key: K) -> KafkaError | None:
        """Returns the error of `key`, None if it succeeded."""
        outcome = self._outcomes[key]
        return outcome if isinstance(outcome, KafkaError) else None

    def all(self) -> dict[K, V]:
        """Returns every value. Raises the first error if a key failed."""
        return {key: self[key] for key in self._outcomes}


def outcome_of(code: int, message: str | None, value: V) -> V | KafkaError:
    """Returns the value, or the error of the code if it is not NONE."""
    return value if code == Errors.NONE else KafkaError(error_of(code), message)


def error_of(code: int) -> Errors:
    """Returns the error of a code. A code that this client does not know is UNKNOWN_SERVER_ERROR."""
    try:
        return Errors(code)
    except ValueError:
        return Errors.UNKNOWN_SERVER_ERROR
