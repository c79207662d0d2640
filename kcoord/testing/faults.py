# SPDX-License-Identifier: Apache-2.0
"""Rules for faults: the requests that they match, how often they apply, and the outcome. Pure: no clock, no sockets.

Every request is compared with the rules in the order in which they were added. The first rule that matches and is not
used up decides alone:

1. The first `skip` matching requests pass. They count as `matched`, and no later rule is applied to them.
2. The next `times` matching requests get the outcome. They count as `matched` and as `hits`.
3. Then the rule is used up. It stays in the list and matches nothing.

`instrumented_connection` carries out the outcome.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from enum import Enum

from kcoord.testing.arguments import Arguments
from kcoord.testing.errors import ControlError
from kcoord.testing.observed import API_NAMES, NAMES_OF_APIS, RequestFacts
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors


class FaultOutcome(Enum):
    """The outcome of a fault."""

    ANSWER = "answer"
    """The normal response, after a delay."""
    ERROR = "error"
    DROP = "drop"
    """No response to this request and to later ones of the connection, as if the broker hung. The connection is closed
    when the fault is removed.
    """
    CLOSE = "close"


@dataclass(slots=True)
class Selector:
    """Selects requests. None matches every request. `member` is a member id or an instance id."""

    api: ApiKey | None = None
    group: str | None = None
    member: str | None = None
    epoch: int | None = None
    client_id: str | None = None

    def matches(self, facts: RequestFacts) -> bool:
        return (
            (self.api is None or self.api is facts.api)
            and (self.group is None or self.group in facts.groups)
            and (self.member is None or self.member in facts.members)
            and (self.epoch is None or self.epoch in facts.epochs)
            and (self.client_id is None or self.client_id == facts.client_id)
        )

    @classmethod
    def taken_from(cls, arguments: Arguments) -> Selector:
        name = arguments.text("api", None)
        return cls(
            None if name is None else api_named(name),
            arguments.text("group", None),
            arguments.text("member", None),
            arguments.number("epoch", None),
            arguments.text("client_id", None),
        )

    def to_json(self) -> dict[str, object]:
        return {
            "api": None if self.api is None else NAMES_OF_APIS[self.api],
            "group": self.group,
            "member": self.member,
            "epoch": self.epoch,
            "client_id": self.client_id,
        }


@dataclass(slots=True)
class RequestFault:
    """A rule. With `after_handling` the broker handles the request first, and only the response is affected."""

    selector: Selector
    outcome: FaultOutcome = FaultOutcome.ANSWER
    error: Errors = Errors.NONE
    message: str | None = None
    delay_ms: int = 0
    after_handling: bool = False
    skip: int = 0
    times: int | None = 1
    number: int = 0
    matched: int = 0
    hits: int = 0

    @property
    def is_used_up(self) -> bool:
        return self.times is not None and self.hits >= self.times

    def to_json(self) -> dict[str, object]:
        return {
            "number": self.number,
            **self.selector.to_json(),
            "outcome": self.outcome.value,
            "error": self.error.name if self.outcome is FaultOutcome.ERROR else None,
            "delay_ms": self.delay_ms,
            "after_handling": self.after_handling,
            "skip": self.skip,
            "times": self.times,
            "matched": self.matched,
            "hits": self.hits,
        }


def fault_from(arguments: Arguments) -> RequestFault:
    """Decodes a rule from JSON. Raises ControlError, which names the wrong field."""
    selector = Selector.taken_from(arguments)
    error = arguments.text("error", None)
    outcomes = [FaultOutcome.ERROR] if error is not None else []
    outcomes += [outcome for outcome in (FaultOutcome.DROP, FaultOutcome.CLOSE) if arguments.flag(outcome.value)]
    fault = RequestFault(
        selector,
        outcomes[0] if outcomes else FaultOutcome.ANSWER,
        Errors.NONE if error is None else error_named(error),
        arguments.text("message", None),
        arguments.count("delay_ms"),
        arguments.flag("after_handling"),
        arguments.count("skip"),
        arguments.count("times", 1) or None,
    )
    arguments.end()
    if len(outcomes) > 1:
        raise ControlError("only one of error, drop and close is allowed")
    if fault.outcome is FaultOutcome.ANSWER and not fault.delay_ms:
        raise ControlError("a fault needs error, delay_ms, drop or close")
    return fault


def api_named(name: str) -> ApiKey:
    """Returns the API with a name such as OffsetCommit or OFFSET_COMMIT."""
    normalized = name.replace("_", "").lower()
    for api_name, api in API_NAMES.items():
        if api_name.lower() == normalized:
            return api
    raise ControlError(f"api: unknown API {name!r}; the APIs are {', '.join(sorted(API_NAMES))}")


def error_named(name: str) -> Errors:
    """Returns the error with a name such as NOT_COORDINATOR, or with a code."""
    if name.removeprefix("-").isdecimal() and int(name) in Errors._value2member_map_:
        return Errors(int(name))
    try:
        return Errors[name.upper()]
    except KeyError:
        raise ControlError(
            f"error: unknown error {name!r}; use a Kafka error name such as NOT_COORDINATOR, or its code"
        ) from None


class Faults:
    """The active rules, oldest first."""

    def __init__(self) -> None:
        self._rules: dict[int, RequestFault] = {}
        self._numbers = itertools.count(1)

    def add(self, fault: RequestFault) -> RequestFault:
        fault.number = next(self._numbers)
        self._rules[fault.number] = fault
        return fault

    def meet(self, facts: RequestFacts) -> RequestFault | None:
        """Returns the rule that applies to a request and counts the hit; None if the request passes."""
        for fault in self._rules.values():
            if fault.is_used_up or not fault.selector.matches(facts):
                continue
            fault.matched += 1
            if fault.matched <= fault.skip:
                return None
            fault.hits += 1
            return fault
        return None

    def get(self, number: int) -> RequestFault:
        fault = self._rules.get(number)
        if fault is None:
            raise ControlError(f"there is no fault {number}", 404)
        return fault

    def remove(self, number: int) -> RequestFault:
        fault = self.get(number)
        del self._rules[number]
        return fault

    def all(self) -> list[RequestFault]:
        return list(self._rules.values())

    def clear(self) -> None:
        self._rules.clear()
