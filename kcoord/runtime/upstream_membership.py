# SPDX-License-Identifier: Apache-2.0
"""An instance as a member of the instances' group in the upstream: which shards it owns, and for how long.

Theory of operation
-------------------
The instances in front of an upstream are static members of one classic group there, as the workers of Kafka Connect
are. The upstream's group coordinator notices that an instance has ended, and the leader of the group spreads the shards
(`kcoord.runtime.shard_map`). This module is one member. It has no clock and does no IO. Its caller passes in the time
and the answers of the upstream, and takes the `actions` after each call: requests to send, and outcomes. A request is
its own ticket. An answer to a request that the member does not wait for any more is ignored. `now_ms` is a monotonic
time.

    OUT     -> JOINING  join
    JOINING -> SYNCING  the upstream has all members, and has chosen the leader
    SYNCING -> MEMBER   the assignment is here: `Assigned`
    MEMBER  -> JOINING  a rebalance has begun, or this instance begins one because its addresses have changed
    any     -> JOINING  the upstream does not know the member any more
    any     -> OUT      leave
    any     -> FAILED   the upstream refuses the member for good, or another process has its node id: `Failed`

Shards keep their owner while the group rebalances. The new owner of a shard does not wait for the old one: its claim
fences it (`kcoord.runtime.upstream_log`).

The lease. An instance may own shards while `holds_lease`. The lease ends one session timeout after the time at which
the last heartbeat (or SyncGroup) that succeeded was created, which is before the upstream received it. So the lease is
over before the upstream can give the shards to another instance, whatever the network or the process did meanwhile. At
its end the member reports `LeaseOver` once. The caller then closes its shards. If the upstream confirms later that the
member is still in the generation of its map, `Assigned` follows with the same map. The lease covers an instance that
was away. During a rebalance of live members, and if clocks do not run equally fast, only the claims decide.

Heartbeats continue while JoinGroup waits for other members, which may take a session timeout. They have the generation
of the map, and prolong its lease. A heartbeat also shows that the answer to JoinGroup was lost, or the request itself:
then it is repeated. There are no heartbeats while SyncGroup is in flight: the upstream expects none.

A claim may fence the owner that the map names: an instance whose lease was over, or one that is replaced, had sent it
before. The caller reports this with `fenced`. If a heartbeat created later confirms the member, `Reclaim` follows.

A member joins with an empty member id only at the start, and after the upstream has rejected its id as unknown. So a
process that was stopped for long, and replaced, does not push its successor out: its id is known, and fenced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Final, TypeAlias

from kcoord.runtime.shard_map import NO_GENERATION, Instance, ShardMap, decode_map, encode_metadata, plan
from kcoord_protocol.errors import DecodeError, Errors, KafkaError

FIRST_RETRY_MS: Final = 50
LOST_ANSWER_MS: Final = 1_000
"""If a heartbeat shows that JoinGroup has been answered or forgotten, the answer has this time to arrive."""
_NEVER: Final = float("inf")
_REFUSED_AT_FIRST: Final = frozenset(
    {
        Errors.GROUP_AUTHORIZATION_FAILED,
        Errors.INCONSISTENT_GROUP_PROTOCOL,
        Errors.INVALID_GROUP_ID,
        Errors.INVALID_SESSION_TIMEOUT,
        Errors.UNSUPPORTED_VERSION,
    }
)
"""Errors that end a member that has never had a map: its settings are wrong. Later they may pass."""


class InstanceState(Enum):
    """The states of the member. The module docstring has the transitions."""

    OUT = "out"
    JOINING = "joining"
    SYNCING = "syncing"
    MEMBER = "member"
    FAILED = "failed"


@dataclass(slots=True, eq=False)
class JoinGroup:
    """A request to join. The answer is `joined` or `refused`; it may take as long as `rebalance_timeout_ms`."""

    member_id: str
    metadata: bytes = field(repr=False)
    created_ms: int


@dataclass(slots=True, eq=False)
class SyncGroup:
    """A request for the assignment. The answer is `synced` or `refused`. The leader sends all `assignments`."""

    member_id: str
    generation: int
    assignments: Mapping[str, bytes] = field(repr=False)
    """By member id. Empty if this member is not the leader."""
    created_ms: int


@dataclass(slots=True, eq=False)
class Heartbeat:
    """A heartbeat. The answer is `beaten` or `refused`."""

    member_id: str
    generation: int
    created_ms: int


@dataclass(slots=True, eq=False)
class LeaveGroup:
    """A request to leave. No answer is needed."""

    member_id: str


@dataclass(slots=True, eq=False)
class Assigned:
    """The instance owns `shard_ids` from now on, and no others."""

    shard_map: ShardMap
    shard_ids: Sequence[int]


@dataclass(slots=True, eq=False)
class Reclaim:
    """The instance still owns these shards, whose logs another instance has claimed."""

    shard_ids: Sequence[int]


@dataclass(slots=True, eq=False)
class LeaseOver:
    """The instance owns no shard any more."""

    reason: str


@dataclass(slots=True, eq=False)
class Failed:
    """The instance cannot be a member. It owns no shard any more, and does not try again."""

    error: KafkaError


Request: TypeAlias = JoinGroup | SyncGroup | Heartbeat | LeaveGroup
Outcome: TypeAlias = Assigned | Reclaim | LeaseOver | Failed
Action: TypeAlias = Request | Outcome


class UpstreamMembership:
    """One member. The module docstring describes the states and who calls what.

    `shard_count` is the number of shards, and `record_version` the highest version of records that this release reads.
    """

    def __init__(
        self,
        node_id: int,
        shard_count: int,
        *,
        session_timeout_ms: int,
        heartbeat_interval_ms: int,
        record_version: int,
    ) -> None:
        self.state = InstanceState.OUT
        self.actions: list[Action] = []
        self.shard_map: ShardMap | None = None
        """The last map that this instance got, also while it has no lease."""
        self.generation = NO_GENERATION
        self.member_id = ""
        self.confirmed_ms = 0
        """The creation time of the last request with which the upstream confirmed this member."""
        self._node_id = node_id
        self._shard_count = shard_count
        self._session_timeout_ms = session_timeout_ms
        self._heartbeat_interval_ms = heartbeat_interval_ms
        self._record_version = record_version
        self._instance: Instance | None = None
        self._attempt = 0
        self._assignments: Mapping[str, bytes] = {}
        """What the leader sends with SyncGroup."""
        self._has_lease = False
        self._lease_until_ms: float = -_NEVER
        self._request: JoinGroup | SyncGroup | None = None
        """The request whose answer the member waits for; None between its failure and the next attempt."""
        self._retry_ms: float = _NEVER
        """The time at which JoinGroup or SyncGroup is sent again."""
        self._failures = 0
        self._fenced: dict[int, int] = {}
        """The times at which shards were fenced."""
        self._outdated = 0
        """The number of maps in a row without the current addresses of this instance."""
        self._heartbeat: Heartbeat | None = None
        self._heartbeat_ms: float = _NEVER
        self._heartbeat_failures = 0

    # Called by the instance.

    @property
    def rebalance_timeout_ms(self) -> int:
        """The time in which a live member has to join again in a rebalance."""
        return self._session_timeout_ms

    def holds_lease(self, now_ms: int) -> bool:
        """Returns whether the instance may act as the owner of its shards."""
        return self._has_lease and now_ms < self._lease_until_ms

    def lease_left_ms(self, now_ms: int) -> int:
        """Returns the time until the lease ends, 0 if there is none."""
        return int(self._lease_until_ms - now_ms) if self.holds_lease(now_ms) else 0

    def join(self, instance: Instance, now_ms: int) -> None:
        """Joins the group, or announces other addresses of this instance to it."""
        self._instance = instance
        if self.state is InstanceState.OUT:
            self._begin_join(now_ms)
        elif self.state is InstanceState.MEMBER:
            self._join_if_outdated(now_ms)

    def leave(self) -> None:
        """Leaves the group. The caller has closed its shards."""
        if self.member_id and self.state is not InstanceState.FAILED:
            self.actions.append(LeaveGroup(self.member_id))
        self._end(InstanceState.OUT)

    def hurry(self, now_ms: int) -> None:
        """Sends the next heartbeat now: there may be a rebalance, or this instance may have been replaced."""
        if self._heartbeat_ms < _NEVER:
            self._heartbeat_ms = now_ms
            self.tick(now_ms)

    def fenced(self, shard_id: int, now_ms: int) -> None:
        """Another instance has claimed the log of a shard."""
        self._fenced.setdefault(shard_id, now_ms)
        self.hurry(now_ms)

    def tick(self, now_ms: int) -> None:
        """Does what is due: the end of the lease, the next heartbeat, and repeated requests."""
        self._follow_lease(now_ms)
        if now_ms >= self._heartbeat_ms and self._heartbeat is None:
            self._heartbeat = Heartbeat(self.member_id, self.generation, now_ms)
            self._heartbeat_ms = now_ms + self._heartbeat_interval_ms
            self.actions.append(self._heartbeat)
        if now_ms >= self._retry_ms:
            self._repeat(now_ms)

    @property
    def next_ms(self) -> float:
        """The time of the next `tick`; infinite if nothing is due before the next answer."""
        heartbeat_ms = self._heartbeat_ms if self._heartbeat is None else _NEVER
        lease_ms = self._lease_until_ms if self._has_lease else _NEVER
        return min(heartbeat_ms, lease_ms, self._retry_ms)

    # Answers.

    def joined(
        self,
        request: JoinGroup,
        member_id: str,
        generation: int,
        members: Mapping[str, bytes] | None,
        now_ms: int,
    ) -> None:
        """All members have joined. `members`: their metadata, if this member has to make the assignments."""
        if request is not self._request:
            return
        self.member_id, self.generation = member_id, generation
        assignments: dict[str, bytes] = {}
        if members is not None:
            assignment = plan(generation, members.values(), self._shard_count, self.shard_map)
            assignments = dict.fromkeys(members, assignment)
        self.state = InstanceState.SYNCING
        self._failures = 0
        self._heartbeat = None
        self._heartbeat_ms = _NEVER
        self._assignments = assignments
        self._send_sync(now_ms)

    def synced(self, request: SyncGroup, assignment: bytes, now_ms: int) -> None:
        """The assignment of this member."""
        if request is not self._request:
            return
        try:
            shard_map = decode_map(assignment)
        except DecodeError:
            # The upstream has no assignment for this member, so this one begins another rebalance.
            self._begin_join(now_ms, delay_ms=self._heartbeat_interval_ms)
            return
        if shard_map.record_version > self._record_version:
            self.actions.append(LeaveGroup(self.member_id))
            self._fail(
                KafkaError(
                    Errors.UNSUPPORTED_VERSION,
                    f"the other instances write records of version {shard_map.record_version}, and this release reads "
                    f"versions up to {self._record_version}",
                )
            )
            return
        self.shard_map = shard_map
        self.state = InstanceState.MEMBER
        self._request = None
        self._heartbeat_ms = now_ms + self._heartbeat_interval_ms
        self._prolong(request.created_ms, now_ms)
        if now_ms < self._lease_until_ms:
            self._assign()
        else:
            self._end_lease("the assignment has arrived too late")
        self._join_if_outdated(now_ms)

    def beaten(self, request: Heartbeat, now_ms: int, *, rebalances: bool) -> None:
        """The upstream confirmed the member. `rebalances`: a rebalance has begun."""
        if request is not self._heartbeat:
            return
        self._heartbeat = None
        self._heartbeat_failures = 0
        self._prolong(request.created_ms, now_ms)
        if self.state is InstanceState.MEMBER and not self._has_lease and now_ms < self._lease_until_ms:
            self._assign()
        if rebalances:
            if self.state is not InstanceState.JOINING:
                self._begin_join(now_ms)
        elif self.state is InstanceState.JOINING:
            self._expect_answer(request, now_ms)
        else:
            self._reclaim(request)

    def refused(self, request: Request, error: KafkaError, now_ms: int) -> None:
        """The upstream rejected a request, or its outcome is unknown."""
        code = error.error
        is_heartbeat = isinstance(request, Heartbeat)
        if isinstance(request, LeaveGroup) or request is not (self._heartbeat if is_heartbeat else self._request):
            return
        if is_heartbeat:
            self._heartbeat = None
        else:
            self._request = None
        if code is Errors.FENCED_INSTANCE_ID or (self.shard_map is None and code in _REFUSED_AT_FIRST):
            self._fail(error)
        elif code is Errors.UNKNOWN_MEMBER_ID and request.member_id:
            self._forget_member(error, now_ms)
        elif isinstance(request, Heartbeat):
            self._heartbeat_refused(request, error, now_ms)
        elif code is Errors.REBALANCE_IN_PROGRESS or code is Errors.ILLEGAL_GENERATION:
            self._begin_join(now_ms)
        else:
            self._failures += 1
            self._retry_ms = now_ms + self._backoff_ms(self._failures)

    def _heartbeat_refused(self, request: Heartbeat, error: KafkaError, now_ms: int) -> None:
        if error.error is not Errors.ILLEGAL_GENERATION:
            self._heartbeat_failures += 1
            self._heartbeat_ms = now_ms + self._backoff_ms(self._heartbeat_failures)
        elif self.state is InstanceState.JOINING:
            self._expect_answer(request, now_ms)
        else:
            self._begin_join(now_ms)

    def _reclaim(self, heartbeat: Heartbeat) -> None:
        """Reports the fenced shards that this member still owned when the heartbeat was created."""
        shard_ids = [shard_id for shard_id, fenced_ms in self._fenced.items() if fenced_ms <= heartbeat.created_ms]
        if shard_ids and self._has_lease:
            for shard_id in shard_ids:
                del self._fenced[shard_id]
            self.actions.append(Reclaim(shard_ids))

    # Joining.

    def _begin_join(self, now_ms: int, delay_ms: int = 0) -> None:
        self.state = InstanceState.JOINING
        self._failures = 0
        self._request = None
        self._retry_ms = now_ms + delay_ms
        if not delay_ms:
            self._repeat(now_ms)

    def _repeat(self, now_ms: int) -> None:
        """Sends JoinGroup or SyncGroup, the first time or again."""
        if self.state is InstanceState.SYNCING:
            self._send_sync(now_ms)
            return
        assert self._instance is not None
        self._retry_ms = _NEVER
        self._attempt += 1
        metadata = encode_metadata(self._instance, self._record_version, self.shard_map, self._attempt)
        self._request = JoinGroup(self.member_id, metadata, now_ms)
        self.actions.append(self._request)

    def _send_sync(self, now_ms: int) -> None:
        self._retry_ms = _NEVER
        self._request = SyncGroup(self.member_id, self.generation, self._assignments, now_ms)
        self.actions.append(self._request)

    def _backoff_ms(self, failures: int) -> int:
        return min(FIRST_RETRY_MS << min(failures - 1, 10), self._heartbeat_interval_ms)

    def _expect_answer(self, heartbeat: Heartbeat, now_ms: int) -> None:
        """Repeats JoinGroup soon, if it was sent before the heartbeat: the upstream does not have it, or has answered.

        An answer that arrives until then counts.
        """
        if isinstance(self._request, JoinGroup) and self._request.created_ms < heartbeat.created_ms:
            self._retry_ms = min(self._retry_ms, now_ms + LOST_ANSWER_MS)

    def _join_if_outdated(self, now_ms: int) -> None:
        """Joins again if the map has old addresses of this instance, or lacks it."""
        assert self.shard_map is not None
        if self.shard_map.instances.get(self._node_id) == self._instance:
            self._outdated = 0
            return
        self._outdated += 1
        self._begin_join(now_ms, delay_ms=0 if self._outdated == 1 else self._backoff_ms(self._outdated))

    # The lease.

    def _follow_lease(self, now_ms: int) -> None:
        """Ends the lease if its time is over."""
        if self._has_lease and now_ms >= self._lease_until_ms:
            self._end_lease(f"the upstream has confirmed no heartbeat for {self._session_timeout_ms} ms")

    def _prolong(self, created_ms: int, now_ms: int) -> None:
        """The upstream knew this member at a time that is not before `created_ms`."""
        # A lease that was over since the last tick does not come back: appends were dropped meanwhile.
        self._follow_lease(now_ms)
        self.confirmed_ms = max(self.confirmed_ms, created_ms)
        self._lease_until_ms = self.confirmed_ms + self._session_timeout_ms

    def _assign(self) -> None:
        assert self.shard_map is not None
        self._has_lease = True
        self._fenced.clear()
        self.actions.append(Assigned(self.shard_map, self.shard_map.shards_of(self._node_id)))

    def _end_lease(self, reason: str) -> None:
        if self._has_lease:
            self._has_lease = False
            self.actions.append(LeaseOver(reason))

    def _forget_member(self, error: KafkaError, now_ms: int) -> None:
        """Joins as a new member: the upstream has removed this one."""
        self._end_lease(f"the upstream has removed this instance from the group: {error}")
        self.member_id = ""
        self.generation = NO_GENERATION
        self._heartbeat = None
        self._heartbeat_ms = _NEVER
        self._lease_until_ms = -_NEVER
        self._begin_join(now_ms)

    def _fail(self, error: KafkaError) -> None:
        self._end(InstanceState.FAILED)
        self.actions.append(Failed(error))

    def _end(self, state: InstanceState) -> None:
        self.state = state
        self.member_id = ""
        self.generation = NO_GENERATION
        self._request = self._heartbeat = None
        self._has_lease = False
        self._lease_until_ms = -_NEVER
        self._retry_ms = self._heartbeat_ms = _NEVER
