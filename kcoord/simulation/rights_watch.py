# SPDX-License-Identifier: Apache-2.0
"""Watches every request of a run with ACLs: which states of the ACLs were possible for it, and whether one fits.

`ask` is called when a request arrives, `wrote` when the server has taken it, and `answered` when its response leaves.
Changes of ACLs by the super user change the oracle. `rights_checks` judges responses; the records are judged here:

* S-1: a commit is written only if its client may read the group and the topic.
* S-2: a regular expression resolves only to topics that the member may describe. A heartbeat starts the resolution,
  which may end up to `_LONGEST_WORK_MS` later, and uses the ACLs of its beginning. An assignment has only topics that
  were resolved, or that a heartbeat with the right has named.
* S-3: a request that was denied as a whole writes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kcoord.runtime.result import CoordinatorRecord
from kcoord.simulation.acl_oracle import AclOracle, ClientRights
from kcoord.simulation.clock import VirtualClock
from kcoord.simulation.options import SUPER_USER, Options
from kcoord.simulation.principals import first_acls, host_of, principal_of
from kcoord.simulation.rights_checks import ANSWERS, COMMITS, DENIED, FAILED, HIDDEN, Exchanged, Problem, errors_in
from kcoord.simulation.trace import Trace, ViolationError
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    CreateAclsRequest,
    DeleteAclsRequest,
    Message,
    OffsetCommitKey,
)

_LONGEST_WORK_MS: Final = 3_000
"""Longest time from a heartbeat to the resolution of regular expressions that it starts, without pauses."""


@dataclass(slots=True)
class AskedRights:
    """A request whose rights are checked. `since` is the oldest state that was possible when it arrived."""

    client_id: str
    api_key: ApiKey
    request: Message
    since: int
    change: int | None = None
    """The state that a change of ACLs leads to."""
    has_written: bool = False


class RightsWatch:
    """The checks of the rights of one run. `names` has all topics that ever existed, by id."""

    def __init__(self, options: Options, clock: VirtualClock, trace: Trace, names: Mapping[bytes, str]) -> None:
        self._oracle = AclOracle(frozenset(first_acls()))
        self._clock = clock
        self._trace = trace
        self._names = names
        pause_ms = options.session_timeout_ms + 2_000 if options.every_ms["pause"] else 0
        self._longest_work_ms = _LONGEST_WORK_MS + pause_ms
        self._beats: dict[str, deque[tuple[int, int, str]]] = {}
        """Time, oldest state and client of the heartbeats of each group of guests."""
        self._visible: dict[str, set[str]] = {}
        """The topics that each group of guests may have learned of."""

    def ask(self, client_id: str, api_key: ApiKey, request: Message) -> AskedRights | None:
        """Returns None if nothing about the request is to be checked."""
        oracle = self._oracle
        asked = AskedRights(client_id, api_key, request, oracle.acknowledged)
        if principal_of(client_id) == SUPER_USER:
            if not isinstance(request, CreateAclsRequest | DeleteAclsRequest):
                return None
            asked.change = oracle.begin(request)
        elif "/" in client_id and isinstance(request, ConsumerGroupHeartbeatRequest):
            beats = self._beats.setdefault(request.group_id, deque())
            beats.append((self._clock.now_ms, asked.since, client_id))
            while beats[0][0] < self._clock.now_ms - self._longest_work_ms:
                beats.popleft()
        return asked if api_key in ANSWERS else None

    def _clients(self, client_id: str, since: int) -> Iterator[ClientRights]:
        """Yields the client by each state that is possible."""
        principal, host = principal_of(client_id), host_of(client_id)
        return (ClientRights(state, principal, host) for state in self._oracle.states[since:])

    # Records.

    def wrote(self, asked: AskedRights, records: Sequence[CoordinatorRecord]) -> None:
        """Takes the records that the server has written when it got the request."""
        asked.has_written = bool(records)
        if asked.api_key is not ApiKey.OFFSET_COMMIT or not records:
            return
        keys = {(record.key.group, record.key.topic) for record in records if isinstance(record.key, OffsetCommitKey)}
        if not any(
            all(
                client.may_group(AclOperation.READ, group_id) and client.may_topic(AclOperation.READ, topic)
                for group_id, topic in keys
            )
            for client in self._clients(asked.client_id, asked.since)
        ):
            raise ViolationError(COMMITS, f"{asked.client_id} has committed offsets of {sorted(keys)}")

    def regex_resolved(self, group_id: str, topics: Sequence[str]) -> None:
        """Takes the topics that a regular expression of a group matches from now on."""
        if group_id not in self._beats:
            return
        beats = self._beats[group_id]
        earliest_ms = self._clock.now_ms - self._longest_work_ms
        since, client_id = next((since, client_id) for at_ms, since, client_id in beats if at_ms >= earliest_ms)
        if not any(
            all(client.may_topic(AclOperation.DESCRIBE, topic) for topic in topics)
            for client in self._clients(client_id, since)
        ):
            raise ViolationError(HIDDEN, f"a regular expression of {group_id} matches {topics}")
        self._visible.setdefault(group_id, set()).update(topics)

    # Responses.

    def answered(self, asked: AskedRights, response: Message) -> None:
        errors = errors_in(response)
        if asked.change is not None:
            if not any(errors):
                self._oracle.acknowledge(asked.change)
            return
        for error in errors & FAILED:
            self._trace.add(f"denied {asked.api_key.name} {Errors(error).name}", asked.client_id)
        problem: Problem = None
        for client in self._clients(asked.client_id, asked.since):
            problem = ANSWERS[asked.api_key](Exchanged(client, asked.request, response, self._names))
            if problem is None:
                break
        if problem is not None:
            text = f"{asked.client_id}: {problem[1]}: {asked.request} {response}"
            raise ViolationError(problem[0], text)
        if errors and errors <= FAILED and asked.has_written:
            raise ViolationError(DENIED, f"{asked.request} was denied and wrote records")
        if isinstance(response, ConsumerGroupHeartbeatResponse) and "/" in asked.client_id:
            self._check_assignment(asked, response)

    def _check_assignment(self, asked: AskedRights, response: ConsumerGroupHeartbeatResponse) -> None:
        request = asked.request
        assert isinstance(request, ConsumerGroupHeartbeatRequest)
        visible = self._visible.setdefault(request.group_id, set())
        if not response.error_code:
            visible.update(request.subscribed_topic_names or ())
        assigned = response.assignment.topic_partitions if response.assignment is not None else []
        hidden = {self._names[topic.topic_id] for topic in assigned} - visible
        if hidden:
            raise ViolationError(HIDDEN, f"{asked.client_id} is assigned partitions of {sorted(hidden)}")
