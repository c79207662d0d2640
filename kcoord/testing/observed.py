# SPDX-License-Identifier: Apache-2.0
"""Extracts the groups, members and epochs of a request of any API. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.json_form import to_json
from kcoord_protocol.message import Message

_GROUP_FIELDS = ("group_id", "groups", "group_ids", "groups_names")
_MEMBER_FIELDS = ("member_id", "instance_id", "group_instance_id")
_EPOCH_FIELDS = ("member_epoch", "generation_id", "generation_id_or_member_epoch")
_GROUP_KEY_TYPE = 0

API_NAMES = {"".join(part.capitalize() for part in api.name.split("_")): api for api in ApiKey}
"""API keys by Kafka's spelling, such as `OffsetCommit`."""
NAMES_OF_APIS = {api: name for name, api in API_NAMES.items()}


@dataclass(slots=True, frozen=True)
class RequestFacts:
    """The values by which requests are selected. `members` has member ids and instance ids."""

    api: ApiKey
    version: int
    client_id: str
    groups: frozenset[str]
    members: frozenset[str]
    epochs: frozenset[int]


def facts_of(api: ApiKey, version: int, client_id: str, request: Message) -> RequestFacts:
    groups, members, epochs = set(_groups(api, request)), set(_texts(request, _MEMBER_FIELDS)), set(_epochs(request))
    for part in _parts(request):
        groups.update(_texts(part, ("group_id",)))
        members.update(_texts(part, _MEMBER_FIELDS))
        epochs.update(_epochs(part))
    return RequestFacts(api, version, client_id, frozenset(groups), frozenset(members), frozenset(epochs))


def _parts(request: Message) -> Iterator[object]:
    """Yields nested parts of a request: LeaveGroup has a list of members, OffsetFetch a list of groups."""
    for name in ("members", "groups"):
        for part in getattr(request, name, None) or ():
            if not isinstance(part, str):
                yield part


def _groups(api: ApiKey, request: Message) -> Iterator[str]:
    yield from _texts(request, _GROUP_FIELDS)
    if api is ApiKey.FIND_COORDINATOR and getattr(request, "key_type", _GROUP_KEY_TYPE) == _GROUP_KEY_TYPE:
        yield from _texts(request, ("key", "coordinator_keys"))


def _texts(part: object, names: tuple[str, ...]) -> Iterator[str]:
    for name in names:
        value = getattr(part, name, None)
        for text in value if isinstance(value, list) else [value]:
            if isinstance(text, str) and text:
                yield text


def _epochs(part: object) -> Iterator[int]:
    for name in _EPOCH_FIELDS:
        value = getattr(part, name, None)
        if isinstance(value, int):
            yield value


@dataclass(slots=True)
class Observation:
    """One request that a client sent."""

    number: int
    time_ms: int
    correlation_id: int
    facts: RequestFacts
    request: Message
    fault: int | None = None
    """The number of the fault that was applied, or None."""
    body: dict[str, object] | None = field(default=None, init=False)

    def to_json(self) -> dict[str, object]:
        facts = self.facts
        if self.body is None:
            self.body = to_json(self.request, facts.version)
        return {
            "number": self.number,
            "time_ms": self.time_ms,
            "api": NAMES_OF_APIS[facts.api],
            "version": facts.version,
            "client_id": facts.client_id,
            "correlation_id": self.correlation_id,
            "groups": sorted(facts.groups),
            "members": sorted(facts.members),
            "epochs": sorted(facts.epochs),
            "fault": self.fault,
            "body": self.body,
        }
