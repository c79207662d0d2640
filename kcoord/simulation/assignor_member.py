# SPDX-License-Identifier: Apache-2.0
"""A model member with client-side assignors. Some of these members compute as KIP-848 says, and others misbehave.

Theory of operation
-------------------
A response with ShouldComputeAssignment starts a computation, and a response without it ends the computation.
`_prepare` asks for the snapshot, `_compute` draws how long the assignor takes, and `_install` sends the result. Only
one request is under way at a time: a step waits for the response to a heartbeat, and a heartbeat for that of a step.
After a timeout, or an error that another attempt may cure, the next response with the flag repeats the step.

`Conduct` says how the member behaves when it is asked. It stays the same for one incarnation, until `behave` ends all
misbehaviour. A group with such a member has to settle, however the other members behave.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from random import Random
from typing import Final

from kcoord.simulation.checkers import TopicPartition
from kcoord.simulation.client import RETRIABLE, RETRY_MS, Scene
from kcoord.simulation.consumer import HEARTBEAT_VERSION, ModelConsumer
from kcoord.simulation.options import MOST_ASSIGNOR_BYTES
from kcoord.simulation.promises import PromisedSubscription, Promises
from kcoord.simulation.trace import ViolationError
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupPrepareAssignmentResponse,
)


class Conduct(Enum):
    """How a member behaves when it is asked to compute."""

    GOOD = "good"
    SLOW = "slow"
    """Computes well, and nearly for as long as it may."""
    SILENT = "silent"
    LATE = "late"
    """Computes well, and installs after its time."""
    WRONG = "wrong"
    """Installs an invalid assignment."""
    FAILING = "failing"
    """Installs an error below 0: its assignor failed."""
    ERROR = "error"
    """Installs an error above 0, which all members get, mostly without an assignment."""
    DYING = "dying"
    """Crashes while it computes."""
    LYING = "lying"
    """Installs for another group epoch or at another member epoch."""
    INTRUDING = "intruding"
    """Computes well, but also if it is not asked."""


CONDUCTS: Final[Mapping[str, Sequence[Conduct]]] = {
    "any": (*Conduct, *[Conduct.GOOD] * 5),
    "lying": (Conduct.LYING, Conduct.INTRUDING, Conduct.LYING, Conduct.LATE),
    "silent": (Conduct.GOOD, Conduct.SILENT, Conduct.SLOW),
    "failing": (Conduct.FAILING, Conduct.WRONG, Conduct.FAILING),
}
"""What the members of a run draw their conduct from, by the option `conducts`."""
OWN_ASSIGNORS: Final = ("weight", "spread")
_EVERY_VERSION: Final = (-1, 4, 1)
_VERSIONS: Final = ((-1, 1, 1), (-1, 1, 1), (-1, 1, 0), (-1, 0, 0), (0, 2, 2), (3, 4, 3), _EVERY_VERSION)
"""Lowest and highest version that an assignor reads, and the version that it writes."""
_LONGEST_COMPUTATION_MS: Final = 400
_INTRUSION_PROBABILITY: Final = 0.3
_PREPARE: Final = 0
_INSTALL: Final = 0
_ABOVE_ZERO: Final = 7

_Members = list[ConsumerGroupInstallAssignmentRequest.Member]
_Member = ConsumerGroupInstallAssignmentRequest.Member
_Topic = ConsumerGroupInstallAssignmentRequest.TopicPartitions
_Offer = ConsumerGroupHeartbeatRequest.ClientAssignor


class AssignorMember(ModelConsumer):
    """One incarnation of a member that offers the assignors `names`, which `conduct` describes."""

    def __init__(
        self,
        member_id: str,
        group_id: str,
        instance_id: str | None,
        subscription: PromisedSubscription,
        scene: Scene,
        random: Random,
        promises: Promises,
        names: Sequence[str],
        conduct: Conduct,
    ) -> None:
        super().__init__(member_id, group_id, instance_id, subscription, None, scene, random, promises)
        self.conduct = conduct
        self._names = names
        # An assignor of a former classic group has to read its user data, which has version -1.
        is_own = names is OWN_ASSIGNORS
        self._versions = random.choice([v for v in _VERSIONS if is_own or v[0] == -1])
        self._offers = self._draw_offers()
        self._is_asked = False
        self._is_computing = False
        self._result: ConsumerGroupInstallAssignmentRequest | None = None
        self._metadata: dict[int, tuple[int, int, bytes]] = {}
        """Member epoch -> error, version and bytes that came with it."""

    def behave(self) -> None:
        """Makes the member good, and able to compute with any version of metadata."""
        self.conduct = Conduct.GOOD
        self._change_versions()

    def subscribe(self, subscription: PromisedSubscription) -> None:
        """Changes the subscription, and in half of the cases the metadata, too."""
        if self.random.random() < 0.5:
            self._offers = self._draw_offers()
        super().subscribe(subscription)

    def _draw_offers(self) -> list[_Offer]:
        lowest, highest, version = self._versions
        names = list(self._names)
        self.random.shuffle(names)
        return [
            _Offer(
                name=name,
                minimum_version=lowest,
                maximum_version=highest,
                reason=self.random.choice((0, 0, 3)),
                metadata_version=version,
                metadata_bytes=self.random.randbytes(2),
            )
            for name in names
        ]

    def _change_versions(self) -> None:
        self._versions = _EVERY_VERSION
        self._offers = self._draw_offers()
        self._is_full = True

    # Heartbeats.

    def _send_heartbeat(self, request: ConsumerGroupHeartbeatRequest, on_answer: Callable[[bytes], None]) -> None:
        if request.rebalance_timeout_ms > 0:
            request.client_assignors = self._offers
        super()._send_heartbeat(request, on_answer)

    def _rejoin(self, reason: str) -> None:
        self._end_computation()
        self._metadata.clear()
        super()._rejoin(reason)

    def _give_up(self, reason: str) -> None:
        self._is_computing = False
        super()._give_up(reason)

    def on_timeout(self) -> None:
        self._is_computing = False
        super().on_timeout()

    def _on_answer(
        self, body: bytes, asked_epoch: int, sent_ms: int, settled: frozenset[TopicPartition] | None
    ) -> None:
        response = ConsumerGroupHeartbeatResponse.decode(body, HEARTBEAT_VERSION)
        if response.error_code != Errors.UNSUPPORTED_ASSIGNOR:
            if not response.error_code:
                self._check_metadata(response, asked_epoch)
            super()._on_answer(body, asked_epoch, sent_ms, settled)
            return
        self._promises.trace.add("assignor-unsupported", self.member_id)
        self._change_versions()
        self._beat_after(RETRY_MS)

    def _on_good_answer(
        self, response: ConsumerGroupHeartbeatResponse, sent_ms: int, settled: frozenset[TopicPartition] | None
    ) -> None:
        super()._on_good_answer(response, sent_ms, settled)
        self._is_asked = response.should_compute_assignment
        intrudes = self.conduct is Conduct.INTRUDING and self.random.random() < _INTRUSION_PROBABILITY
        if self._is_asked or intrudes:
            self._go_on()
        else:
            self._end_computation()

    def _check_metadata(self, response: ConsumerGroupHeartbeatResponse, asked_epoch: int) -> None:
        """I-24: a member gets metadata with each new epoch, and the metadata of an epoch is final."""
        epoch, assignment = response.member_epoch, response.assignment
        if assignment is None:
            if epoch != asked_epoch:
                text = f"{self.member_id} got epoch {epoch} after {asked_epoch} without an assignment"
                raise ViolationError("I-24 a new epoch has its metadata", text)
            return
        metadata = assignment.error, assignment.metadata_version, assignment.metadata_bytes
        if self._metadata.setdefault(epoch, metadata) != metadata:
            text = f"{self.member_id} got {metadata} at epoch {epoch}, and {self._metadata[epoch]} before"
            raise ViolationError("I-24 metadata is final for an epoch", text)

    # Computations.

    def _end_computation(self) -> None:
        self._is_asked = self._is_computing = False
        self._result = None

    def _go_on(self) -> None:
        """Begins the next step, unless one is under way."""
        if self._is_computing or self.epoch <= 0 or self.conduct is Conduct.SILENT:
            return
        self._is_computing = True
        self._when_quiet(self._prepare if self._result is None else self._install)

    def _when_quiet(self, step: Callable[[], None]) -> None:
        """Runs the step once no response is awaited, unless the computation has ended."""
        incarnation = self._incarnation

        def attempt() -> None:
            if incarnation != self._incarnation or self.is_stopped or not self._is_computing:
                return
            if self.is_waiting:
                self.clock.after(RETRY_MS, attempt)
            else:
                step()

        attempt()

    def _prepare(self) -> None:
        request = ConsumerGroupPrepareAssignmentRequest(
            group_id=self.group_id, member_id=self.member_id, member_epoch=self.epoch
        )
        self.request(ApiKey.CONSUMER_GROUP_PREPARE_ASSIGNMENT, _PREPARE, self.group_id, request, self._on_prepared)

    def _on_prepared(self, body: bytes) -> None:
        response = ConsumerGroupPrepareAssignmentResponse.decode(body, _PREPARE)
        if self._has_failed(response.error_code, response.error_message):
            return
        self._promises.trace.add("prepared", f"{self.member_id} {self.conduct.value}")
        if self.conduct is Conduct.DYING:
            self.crash()
            self.is_fenced = True
            return
        self._result = self._make_result(response)
        timeout_ms = self.options.rebalance_timeout_ms
        delay_ms = self.random.randint(0, _LONGEST_COMPUTATION_MS)
        if self.conduct is Conduct.SLOW:
            delay_ms = self.random.randint(timeout_ms // 2, timeout_ms)
        elif self.conduct is Conduct.LATE:
            delay_ms = self.random.randint(timeout_ms, 2 * timeout_ms)
        incarnation = self._incarnation
        self.clock.after(
            delay_ms, lambda: self._when_quiet(self._install) if incarnation == self._incarnation else None
        )

    def _install(self) -> None:
        request = self._result
        if request is None:
            self._is_computing = False
            return
        request.member_epoch = self.epoch
        if self.conduct is Conduct.LYING and self.random.random() < 0.3:
            request.member_epoch += self.random.choice((-1, 1))
        if request.member_epoch < 0 or self.epoch <= 0:
            self._is_computing = False
            return
        self.request(ApiKey.CONSUMER_GROUP_INSTALL_ASSIGNMENT, _INSTALL, self.group_id, request, self._on_installed)

    def _on_installed(self, body: bytes) -> None:
        response = ConsumerGroupInstallAssignmentResponse.decode(body, _INSTALL)
        if self._has_failed(response.error_code, response.error_message):
            return
        self._promises.trace.add("installed", f"{self.member_id} {self.conduct.value}")
        self._end_computation()

    def _has_failed(self, error: int, text: str | None) -> bool:
        """Takes the error of a step, if there is one, and lets the next heartbeat go."""
        if self._is_beat_due:
            self._beat_after(0)
        if not error:
            return False
        self._promises.trace.add(f"computation: {Errors(error).name}", self.member_id)
        self._is_computing = False
        if error in (Errors.UNKNOWN_MEMBER_ID, Errors.GROUP_ID_NOT_FOUND, Errors.INVALID_ASSIGNMENT):
            self._end_computation()
        elif error not in RETRIABLE and error not in (Errors.STALE_MEMBER_EPOCH, Errors.UNKNOWN_SERVER_ERROR):
            raise self.unexpected(error, text)
        return True

    # Results.

    def _make_result(self, snapshot: ConsumerGroupPrepareAssignmentResponse) -> ConsumerGroupInstallAssignmentRequest:
        epoch, conduct = snapshot.group_epoch, self.conduct
        result = ConsumerGroupInstallAssignmentRequest(
            group_id=self.group_id, member_id=self.member_id, group_epoch=epoch
        )
        if conduct is Conduct.FAILING:
            result.error = -1
            return result
        if conduct is Conduct.ERROR:
            result.error = _ABOVE_ZERO
            if self.random.random() < 0.8:
                return result
        if conduct is Conduct.LYING:
            result.group_epoch += self.random.choice((-1, 0, 1))
        result.members = self._assign(snapshot)
        if conduct is Conduct.WRONG:
            self._spoil(result.members, snapshot)
        return result

    def _assign(self, snapshot: ConsumerGroupPrepareAssignmentResponse) -> _Members:
        """Gives each partition to the subscriber with the fewest; a subscriber keeps most of what it has."""
        owners = {
            (topic.topic_id, partition): member.member_id
            for member in snapshot.members
            for topic in member.topic_partitions
            for partition in topic.partitions
            if topic.topic_id in member.subscribed_topic_ids
        }
        assigned: dict[str, dict[bytes, list[int]]] = {member.member_id: {} for member in snapshot.members}
        counts = dict.fromkeys(assigned, 0)
        for topic in snapshot.topics:
            subscribers = [m.member_id for m in snapshot.members if topic.topic_id in m.subscribed_topic_ids]
            for partition in range(topic.num_partitions):
                keeper = owners.get((topic.topic_id, partition))
                if keeper is None or counts[keeper] > min(counts[name] for name in subscribers):
                    keeper = min(subscribers, key=lambda name: (counts[name], name))
                counts[keeper] += 1
                assigned[keeper].setdefault(topic.topic_id, []).append(partition)
        return [
            _Member(
                member_id=member.member_id,
                partitions=[
                    _Topic(topic_id=topic_id, partitions=partitions)
                    for topic_id, partitions in assigned[member.member_id].items()
                ],
                metadata_version=member.assignor.metadata_version,
                metadata_bytes=self.random.randbytes(2),
            )
            for member in snapshot.members
            if assigned[member.member_id] or self.random.random() < 0.5
        ]

    def _spoil(self, members: _Members, snapshot: ConsumerGroupPrepareAssignmentResponse) -> None:
        """Makes a valid assignment invalid, in one of several ways."""
        if not members:
            members.append(_Member(member_id="nobody"))
            return
        member = self.random.choice(members)
        topics = [topic for other in members for topic in other.partitions]
        topic = self.random.choice(topics) if topics else _Topic(topic_id=bytes(15) + b"\1")
        match self.random.randrange(9):
            case 0:
                topic.partitions = topic.partitions[1:]
                member.metadata_version = _ABOVE_ZERO
            case 1:
                topic.partitions = topic.partitions[1:]
            case 2:
                topic.partitions = [*topic.partitions, topic.partitions[0] if topic.partitions else 0]
            case 3:
                topic.partitions = [*topic.partitions, self.random.choice((-1, 100))]
            case 4:
                members.append(_Member(member_id="nobody"))
            case 5:
                members.append(_Member(member_id=member.member_id))
            case 6:
                topic_id = bytes(15) + b"\1"
                member.partitions = [*member.partitions, _Topic(topic_id=topic_id, partitions=[0])]
            case 7:
                member.metadata_version = self.random.choice((-2, _ABOVE_ZERO))
            case _:
                member.metadata_bytes = bytes(MOST_ASSIGNOR_BYTES + 1)


def draw_member(
    member_id: str,
    group_id: str,
    instance_id: str | None,
    subscription: PromisedSubscription,
    scene: Scene,
    random: Random,
    promises: Promises,
    is_cooperative: bool | None,
    faults_on: bool,
    *,
    is_good: bool,
) -> AssignorMember:
    """Returns a member of a random conduct, or one that behaves.

    `is_cooperative` is None if no classic members are in the group; they offer assignors by the names of protocols.
    """
    conduct = random.choice(CONDUCTS[scene.options.conducts])
    if not faults_on and conduct is Conduct.DYING:
        # A member that dies each time that it is asked would never settle.
        conduct = Conduct.SILENT
    names: Sequence[str] = OWN_ASSIGNORS
    if is_cooperative is not None:
        names = ("cooperative-sticky",) if is_cooperative else ("range", "roundrobin")
    member = AssignorMember(member_id, group_id, instance_id, subscription, scene, random, promises, names, conduct)
    if is_good:
        member.behave()
    return member
