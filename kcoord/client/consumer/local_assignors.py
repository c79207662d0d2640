# SPDX-License-Identifier: Apache-2.0
"""Runs the assignors of a member: offers them, computes assignments, and passes assignments to them (KIP-848).

Theory of operation. Everything but `assign` runs in the event loop of the consumer:

- The application's task, within `subscribe` and `poll`, asks the assignors for their metadata, and calls their
  `on_assignment`.
- `GroupSession` reports each response to a heartbeat.
- One background task carries out the steps of `Computation`, one at a time. `assign` runs in a thread, so heartbeats
  continue meanwhile. A thread cannot be stopped. If the coordinator does not wait for the member any more, the task
  still waits for the thread, drops its result, and only then begins the next computation. So `assign` never runs twice
  at once.

An assignment is announced once per epoch. The member takes no partition before its assignors know the assignment of
the epoch. For this the names of all topics of the target are needed, also of partitions that are still pending.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from kcoord.client.assignors import AssignmentSpec, GroupAssignment, MemberAssignment, Metadata, PartitionAssignor
from kcoord.client.cluster import Cluster, CoordinatorType
from kcoord.client.consumer.assignment_messages import check_result, install_request, offered_by, spec_of
from kcoord.client.consumer.assignor_offer import AssignorOffer
from kcoord.client.consumer.computation import ASSIGNOR_FAILED, Computation, ComputationPhase
from kcoord.client.consumer.member_state import Partitions
from kcoord.client.consumer.membership import JOIN_EPOCH, HeartbeatResponse, Membership
from kcoord.client.errors import AssignorException, UnsupportedVersionException
from kcoord.client.results import error_of
from kcoord.client.signal import Signal, wait_for
from kcoord.client.tasks import spawn, stop
from kcoord.client.types import TopicIdPartition, TopicPartition
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatResponse,
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupPrepareAssignmentResponse,
)

_log = logging.getLogger(__name__)

_API_KEYS: Final = (ApiKey.CONSUMER_GROUP_PREPARE_ASSIGNMENT, ApiKey.CONSUMER_GROUP_INSTALL_ASSIGNMENT)
_INSTALL_VERSION: Final = 0
_NO_METADATA: Final = -1


class _Announcement(NamedTuple):
    """An assignment that the assignors do not know yet.

    `assignor_name` is empty if the broker computed the assignment, or does not say which assignor did.
    """

    epoch: int
    error: int
    target: Partitions
    assignor_name: str
    metadata: Metadata | None


class LocalAssignors:
    """The assignors of one consumer."""

    def __init__(
        self,
        cluster: Cluster,
        membership: Membership,
        offer: AssignorOffer,
        assignors: Sequence[PartitionAssignor],
        changed: Signal,
    ) -> None:
        self._cluster = cluster
        self._membership = membership
        self._offer = offer
        self._assignors = {assignor.name: assignor for assignor in assignors}
        self._changed = changed
        self._computation = Computation()
        self._wake = Signal()
        self._announced_epoch = JOIN_EPOCH
        self._announcement: _Announcement | None = None
        self._failures: list[AssignorException] = []
        self._task: asyncio.Task[None] | None = None

    # Called by the consumer.

    def start(self) -> None:
        """Starts the task that computes, unless it runs already.

        Raises UnsupportedVersionException if the broker does not serve client-side assignors.
        """
        missing = [key.name for key in _API_KEYS if not self._cluster.offers(key)]
        if missing:
            raise UnsupportedVersionException(
                f"group_local_assignors: the broker does not support {' and '.join(missing)}; kcoord does with "
                "kcoord.client.assignors.enable=true"
            )
        self.update_metadata()
        if self._task is None:
            self._task = spawn(self._run(), "kcoord consumer assignor")

    async def stop(self) -> None:
        await stop([self._task])

    def update_metadata(self) -> None:
        """Asks the assignors for their metadata, and offers it to the coordinator if it changed."""
        self._offer.update(tuple(offered_by(assignor) for assignor in self._assignors.values()))

    def request_reassignment(self, reason: int) -> None:
        """Offers a reason for a new assignment."""
        self._offer.request_reassignment(reason)

    def take_failure(self) -> Exception | None:
        """Returns an error of a computation that `poll` has to raise."""
        return self._failures.pop(0) if self._failures else self._computation.take_failure()

    # Assignments of this member.

    def on_heartbeat(self, response: HeartbeatResponse | None) -> None:
        """Handles a response that `Membership` has handled before; None if there was none without an error."""
        membership = self._membership
        if not membership.is_in_group or membership.member_epoch == JOIN_EPOCH:
            # After the next join the assignment is news, even if its epoch is not: the partitions are lost.
            self._announced_epoch = JOIN_EPOCH
            self._announcement = None
            self._computation.abandon()
        elif isinstance(response, ConsumerGroupHeartbeatResponse):
            if response.assignment is not None and membership.member_epoch != self._announced_epoch:
                self._announcement = _announcement_of(membership.member_epoch, response.assignment)
            self._computation.on_heartbeat(response.should_compute_assignment)
        self._wake.notify()

    def announce(self, names: Mapping[bytes, str]) -> bool:
        """Calls `on_assignment` if there is news. Returns False if it has to wait for names of topics.

        If one of several assignors computed the assignment, only that one is called.
        """
        announcement = self._announcement
        if announcement is None:
            return True
        if not names.keys() >= {partition.topic_id for partition in announcement.target}:
            return False
        self._announcement = None
        self._announced_epoch = announcement.epoch
        target = frozenset(
            TopicPartition(names[partition.topic_id], partition.partition) for partition in announcement.target
        )
        metadata = announcement.metadata
        assignors = list(self._assignors.values())
        if announcement.assignor_name in self._assignors:
            assignors = [self._assignors[announcement.assignor_name]]
        elif len(assignors) > 1:
            # The bytes may be of any of them, and the others could not read them.
            metadata = None
        for assignor in assignors:
            assignor.on_assignment(announcement.error, MemberAssignment(target, metadata), announcement.epoch)
        return True

    def unresolved_topics(self, known_topics: Collection[bytes]) -> set[bytes]:
        """Returns the topics of the assignment to announce whose names are unknown."""
        target = self._announcement.target if self._announcement is not None else ()
        return {partition.topic_id for partition in target} - set(known_topics)

    # Assignments of the group.

    async def _run(self) -> None:
        while True:
            ticket = self._wake.ticket()
            match self._computation.phase:
                case ComputationPhase.PREPARE:
                    await self._prepare()
                case ComputationPhase.ASSIGN:
                    await self._assign()
                case ComputationPhase.INSTALL:
                    await self._install()
                case _:
                    await wait_for(ticket, None)

    async def _prepare(self) -> None:
        membership, computation = self._membership, self._computation
        number = computation.number
        request = ConsumerGroupPrepareAssignmentRequest(
            group_id=membership.group_id, member_id=membership.member_id, member_epoch=membership.member_epoch
        )
        try:
            response = await self._cluster.call_coordinator(
                CoordinatorType.GROUP,
                membership.group_id,
                request,
                ConsumerGroupPrepareAssignmentResponse,
                lambda answer: [answer.error_code],
            )
            if response.error_code:
                raise KafkaError(error_of(response.error_code), response.error_message)
        except KafkaError as error:
            self._on_error(number, error)
        else:
            computation.on_prepared(number, response.assignor_name, spec_of(membership.group_id, response))

    async def _assign(self) -> None:
        computation = self._computation
        number, name, spec = computation.number, computation.assignor_name, computation.spec
        assert spec is not None
        _log.info("group %s: the assignor %s computes epoch %d", spec.group_id, name, spec.group_epoch)
        member_id = self._membership.member_id
        try:
            if name not in self._assignors:
                raise AssignorException("it is not one of group_local_assignors")
            request = await asyncio.to_thread(_compute, self._assignors[name], spec, member_id)
        except Exception as error:
            _log.warning("group %s: the assignor %s failed", spec.group_id, name, exc_info=error)
            text = str(error) if isinstance(error, AssignorException) else repr(error)
            failure = AssignorException(f"the assignor {name} failed: {text}")
            failure.__cause__ = error
            self._failures.append(failure)
            self._changed.notify()
            request = install_request(member_id, spec, GroupAssignment(error=ASSIGNOR_FAILED))
        computation.on_assigned(number, request)

    async def _install(self) -> None:
        membership, computation = self._membership, self._computation
        number, request = computation.number, computation.request
        assert request is not None
        request.member_epoch = membership.member_epoch
        try:
            response = await self._cluster.call_coordinator(
                CoordinatorType.GROUP,
                membership.group_id,
                request,
                ConsumerGroupInstallAssignmentResponse,
                lambda answer: [answer.error_code],
            )
            if response.error_code:
                raise KafkaError(error_of(response.error_code), response.error_message)
        except KafkaError as error:
            self._on_error(number, error)
        else:
            computation.on_installed(number)

    def _on_error(self, number: int, error: KafkaError) -> None:
        _log.info("group %s: computing the assignment failed: %s", self._membership.group_id, error)
        self._computation.on_error(number, error)
        self._changed.notify()


def _compute(
    assignor: PartitionAssignor, spec: AssignmentSpec, member_id: str
) -> ConsumerGroupInstallAssignmentRequest:
    """Runs the assignor and returns the request that installs its result. Runs in a thread."""
    request = install_request(member_id, spec, check_result(spec, assignor.assign(spec)))
    # An encoding shows values that the request cannot have, such as a text instead of bytes, before it is sent.
    request.encode(_INSTALL_VERSION)
    return request


def _announcement_of(epoch: int, assignment: ConsumerGroupHeartbeatResponse.Assignment) -> _Announcement:
    target = frozenset(
        TopicIdPartition(topic.topic_id, partition)
        for topics in (assignment.topic_partitions, assignment.pending_topic_partitions)
        for topic in topics
        for partition in topic.partitions
    )
    metadata = None
    if assignment.metadata_version != _NO_METADATA or assignment.metadata_bytes:
        metadata = Metadata(assignment.metadata_version, assignment.metadata_bytes)
    return _Announcement(epoch, assignment.error, target, assignment.assignor_name, metadata)
