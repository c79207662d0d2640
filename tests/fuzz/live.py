# SPDX-License-Identifier: Apache-2.0
"""A fuzzer of a broker in another process, and a healthy member that the fuzzer must not affect.

Each connection sends a few requests: damaged requests, plausible requests, and requests that follow from earlier
responses (existing members, with epochs near theirs; assignments of members that were asked to compute them). Every
response must belong to a request of the same connection, arrive in order, and decode. A request that closes its
connection must not affect other connections.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar, cast

from kcoord.server.api.served_versions import SERVED_VERSIONS
from kcoord_protocol.api_keys import ApiKey, request_class, response_class
from kcoord_protocol.errors import DecodeError, Errors, UnsupportedVersionError
from kcoord_protocol.framing import FrameReader, decode_request_header, decode_response_header, encode_request
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    ConsumerGroupInstallAssignmentRequest,
    ConsumerGroupInstallAssignmentResponse,
    ConsumerGroupPrepareAssignmentRequest,
    ConsumerGroupPrepareAssignmentResponse,
    FindCoordinatorRequest,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from tests.fuzz.corpus import findings, recorded
from tests.fuzz.mutation import MEMBERS, damaged, plausible

M = TypeVar("M", bound=Message)

CONNECTIONS = 64
MOST_OF_A_CONNECTION = 24
SENTINEL_ID = 0x7FFFFFFF
SILENCE_SECONDS = 0.05
"""The timeout of a response. Some requests wait by design, and the fuzzer does not wait for them."""
COMPUTING_SILENCE_SECONDS = 1.0
"""The timeout on connections whose requests do not wait. The next steps need their responses on slow machines too."""
CHECK_SECONDS = 0.05
PATIENCE_SECONDS = 20.0
_NOT_LOADED = (Errors.NOT_COORDINATOR, Errors.COORDINATOR_LOAD_IN_PROGRESS)
HEALTHY_GROUP, HEALTHY_TOPIC = "healthy", "steady"

_CHANGES_THE_BROKER = {ApiKey.ALTER_CONFIGS, ApiKey.INCREMENTAL_ALTER_CONFIGS}
"""Excluded from plausible requests, since a limit that a request has set to zero is not a finding."""
_COMPUTING_GROUPS = 200
"""More groups than one, because a group whose only member has failed pauses before it asks again."""
_PLAUSIBLE = [(key, version) for key, versions in SERVED_VERSIONS.items() for version in versions]


@dataclass
class Outcome:
    """Counts the outcomes of the inputs."""

    sent: int = 0
    closed: int = 0
    answers: Counter[str] = field(default_factory=Counter)
    installs: Counter[Errors] = field(default_factory=Counter)


class Wire:
    """A connection that writes and reads frames."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self.writer = writer
        self._frames = FrameReader(1 << 27)
        self._ready: list[bytes] = []

    async def frame(self, seconds: float) -> bytes | None:
        """Returns the next response, or None if the connection is closed. Raises TimeoutError after `seconds`."""
        while not self._ready:
            try:
                # In Python 3.11 `wait_for` can swallow the cancellation of its caller.
                async with asyncio.timeout(seconds):
                    data = await self._reader.read(1 << 16)
            except ConnectionError:
                return None
            if not data:
                return None
            self._ready += self._frames.feed(data)
        return self._ready.pop(0)

    async def call(self, request: Message, version: int, seconds: float = PATIENCE_SECONDS) -> Message:
        self.writer.write(encode_request(request.api_key, version, 1, "healthy", request.encode(version)))
        frame = await self.frame(seconds)
        assert frame is not None, f"the connection was closed on a {type(request).__name__}"
        _, position = decode_response_header(frame, request.api_key, version)
        return response_class(request.api_key).decode(frame[position:], version)


@asynccontextmanager
async def connected(port: int) -> AsyncIterator[Wire]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.transport.abort()


class Fuzzer:
    """Sends `inputs` requests in total, generated from `seed`."""

    def __init__(self, port: int, inputs: int, seed: int) -> None:
        self._port = port
        self._left = inputs
        self._chance = Random(seed)
        self._seeds = recorded()
        self._members: list[tuple[str, str, int]] = []
        self._asked: list[tuple[str, str, int]] = []
        self._prepared: list[tuple[ConsumerGroupInstallAssignmentRequest, ConsumerGroupPrepareAssignmentResponse]] = []
        self._first = iter(findings())
        self.outcome = Outcome()

    async def run(self) -> Outcome:
        await asyncio.gather(*(self._work() for _ in range(CONNECTIONS)))
        return self.outcome

    async def _work(self) -> None:
        while self._left > 0:
            frames: list[bytes] = []
            # Connections of their own, since other requests may wait, and the fuzzer then misses later responses.
            computes = self._chance.random() < 0.15
            make = self._next_of_a_computation if computes else self._input
            while len(frames) < MOST_OF_A_CONNECTION:
                frames.append(make())
                if not _is_request(frames[-1]):
                    break  # the broker closes the connection and would ignore later frames
            self._left -= len(frames)
            await self._exchange(
                [_numbered(frame, number) for number, frame in enumerate(frames)],
                COMPUTING_SILENCE_SECONDS if computes else SILENCE_SECONDS,
            )

    def _input(self) -> bytes:
        finding = next(self._first, None)
        if finding is not None:
            return finding
        chance = self._chance
        kind = chance.random()
        if kind < 0.3:
            return damaged(chance.choice(self._seeds), chance)
        if kind < 0.75 or not self._members:
            key, version = chance.choice(_PLAUSIBLE)
            cls = request_class(key)
            if key in _CHANGES_THE_BROKER or version not in cls.valid_versions:
                return self._join()
            frame = _frame(plausible(cls, version, chance), version)
            return damaged(frame, chance) if kind < 0.35 else frame
        return self._next_of_a_member()

    def _join(self) -> bytes:
        chance = self._chance
        group, member = f"g{chance.randrange(20)}", f"m{chance.randrange(5)}"
        self._members = [*self._members[-50:], (group, member, 1)]
        request = ConsumerGroupHeartbeatRequest(
            group_id=group,
            member_id=member,
            member_epoch=0,
            rebalance_timeout_ms=1000,
            subscribed_topic_names=["orders", HEALTHY_TOPIC],
            topic_partitions=[],
        )
        return _frame(request, 1)

    def _next_of_a_member(self) -> bytes:
        chance = self._chance
        group, member, epoch = chance.choice(self._members)
        epoch = chance.choice((epoch, epoch + 1, 0, -1, -2, epoch - 1, 2**31 - 1))
        if chance.random() < 0.7:
            request: Message = plausible(ConsumerGroupHeartbeatRequest, 1, chance)
            assert isinstance(request, ConsumerGroupHeartbeatRequest)
            request.group_id, request.member_id, request.member_epoch = group, member, epoch
            return _frame(request, 1)
        commit = plausible(OffsetCommitRequest, 9, chance)
        assert isinstance(commit, OffsetCommitRequest)
        commit.group_id, commit.member_id, commit.generation_id_or_member_epoch = group, member, epoch
        return _frame(commit, 9)

    def _next_of_a_computation(self) -> bytes:
        """Returns a request on the way from an offer to an assignment, which is then often invalid."""
        frame = self._step_of_a_computation()
        return damaged(frame, self._chance) if self._chance.random() < 0.05 else frame

    def _step_of_a_computation(self) -> bytes:
        chance = self._chance
        step = chance.random()
        if self._prepared and step < 0.5:
            return _frame(self._computed(*chance.choice(self._prepared)), 0)
        if self._asked and step < 0.8:
            group, member, epoch = chance.choice(self._asked)
            return _frame(
                ConsumerGroupPrepareAssignmentRequest(group_id=group, member_id=member, member_epoch=epoch), 0
            )
        of_one = ConsumerGroupHeartbeatRequest.ClientAssignor
        join = ConsumerGroupHeartbeatRequest(
            group_id=f"computing-{chance.randrange(_COMPUTING_GROUPS)}",
            member_id=f"m{chance.randrange(2)}",
            rebalance_timeout_ms=10_000,
            subscribed_topic_names=["orders", HEALTHY_TOPIC],
            topic_partitions=[],
            client_assignors=[
                of_one(name="x", minimum_version=0, maximum_version=1, metadata_version=1, metadata_bytes=b"m")
            ],
        )
        return _frame(join, 1)

    def _computed(
        self, asked: ConsumerGroupInstallAssignmentRequest, prepared: ConsumerGroupPrepareAssignmentResponse
    ) -> ConsumerGroupInstallAssignmentRequest:
        """Returns an Install whose first member gets all partitions, with up to one fault."""
        chance, of_one = self._chance, ConsumerGroupInstallAssignmentRequest
        topics = [
            of_one.TopicPartitions(topic_id=topic.topic_id, partitions=list(range(topic.num_partitions)))
            for topic in prepared.topics
        ]
        members = [of_one.Member(member_id=member.member_id, metadata_version=1) for member in prepared.members]
        members[0].partitions = topics
        error, epoch, fault = 0, prepared.group_epoch, chance.randrange(12)
        if fault == 0:
            members *= 2
        elif fault == 1:
            members[0].member_id = chance.choice(MEMBERS)
        elif fault == 2:
            members[0].partitions = topics * chance.choice((2, 1000))
        elif fault == 3 and topics:
            topics[0].partitions.append(chance.choice((-(2**31), -1, 0, 2**31 - 1)))
        elif fault == 4 and topics:
            topics[0].topic_id = chance.randbytes(16)
        elif fault == 5:
            members[0].metadata_version = chance.choice((-(2**15), -1, 2, 2**15 - 1))
        elif fault == 6:
            error, members = chance.choice((-128, -1, 1, 127)), chance.choice((members, []))
        elif fault == 7:
            epoch = chance.choice((epoch - 1, epoch + 1, -1, 2**31 - 1))
        elif fault == 8:
            request = plausible(of_one, 0, chance)
            assert isinstance(request, ConsumerGroupInstallAssignmentRequest)
            error, members = request.error, request.members
        return of_one(
            group_id=asked.group_id,
            member_id=asked.member_id,
            member_epoch=asked.member_epoch,
            group_epoch=epoch,
            error=error,
            members=members,
        )

    async def _exchange(self, frames: list[bytes], silence_seconds: float) -> None:
        self.outcome.sent += len(frames)
        sentinel = b"\x00\x12\x00\x00" + SENTINEL_ID.to_bytes(4, "big") + b"\xff\xff"
        stream = b"".join(len(frame).to_bytes(4, "big") + frame for frame in [*frames, sentinel])
        async with connected(self._port) as wire:
            wire.writer.write(stream)
            last = -1
            while True:
                try:
                    answer = await wire.frame(silence_seconds)
                except TimeoutError:
                    return
                if answer is None:
                    self.outcome.closed += 1
                    return
                number = int.from_bytes(answer[:4], "big")
                if number == SENTINEL_ID:
                    return
                assert last < number < len(frames), f"answer {number} after {last}"
                last = number
                self._check(frames[number], answer)

    def _check(self, frame: bytes, answer: bytes) -> None:
        key, version = int.from_bytes(frame[:2], "big"), int.from_bytes(frame[2:4], "big")
        if key == ApiKey.API_VERSIONS and version not in SERVED_VERSIONS[ApiKey.API_VERSIONS]:
            version = 0
        _, position = decode_response_header(answer, key, version)
        response = response_class(key).decode(answer[position:], version)
        self.outcome.answers[ApiKey(key).name] += 1
        self._follow(frame, response)
        if isinstance(response, ConsumerGroupHeartbeatResponse) and response.member_epoch > 0:
            self._members = [
                (group, member, response.member_epoch if member == response.member_id else epoch)
                for group, member, epoch in self._members
            ]

    def _follow(self, frame: bytes, response: Message) -> None:
        """Remembers which members are to compute, and what they were given."""
        if isinstance(response, ConsumerGroupInstallAssignmentResponse):
            self.outcome.installs[Errors(response.error_code)] += 1
            assert response.error_code != Errors.UNKNOWN_SERVER_ERROR, frame.hex()
        elif isinstance(response, ConsumerGroupPrepareAssignmentResponse):
            assert response.error_code != Errors.UNKNOWN_SERVER_ERROR, frame.hex()
            request = _decoded(frame, ConsumerGroupPrepareAssignmentRequest)
            if not response.error_code:
                asked = ConsumerGroupInstallAssignmentRequest(
                    group_id=request.group_id, member_id=request.member_id, member_epoch=request.member_epoch
                )
                self._prepared = [*self._prepared[-20:], (asked, response)]
        elif isinstance(response, ConsumerGroupHeartbeatResponse):
            assert response.error_code != Errors.UNKNOWN_SERVER_ERROR, frame.hex()
            if response.should_compute_assignment:
                beat = _decoded(frame, ConsumerGroupHeartbeatRequest)
                self._asked = [*self._asked[-20:], (beat.group_id, beat.member_id, response.member_epoch)]


def _decoded(frame: bytes, cls: type[M]) -> M:
    header, position = decode_request_header(frame)
    return cls.decode_prefix(frame, position, header.request_api_version)[0]


def _is_request(frame: bytes) -> bool:
    key, version = int.from_bytes(frame[:2], "big"), int.from_bytes(frame[2:4], "big")
    if version not in SERVED_VERSIONS.get(cast("ApiKey", key), ()):
        return key == ApiKey.API_VERSIONS and len(frame) >= 8
    try:
        _, position = decode_request_header(frame)
        request_class(key).decode_prefix(frame, position, version)
    except (DecodeError, UnsupportedVersionError):
        return False
    return True


def _frame(request: Message, version: int) -> bytes:
    return encode_request(request.api_key, version, 0, "fuzz", request.encode(version))[4:]


def _numbered(frame: bytes, number: int) -> bytes:
    return frame[:4] + number.to_bytes(4, "big") + frame[8:] if len(frame) >= 8 else frame


class HealthyMember:
    """A member that sends heartbeats and fetches its offset, and must get the responses of an undisturbed member."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.beats = 0

    async def run(self) -> None:
        """Runs until it is cancelled. Fails at the first wrong response."""
        async with connected(self._port) as wire:
            join = ConsumerGroupHeartbeatRequest(
                group_id=HEALTHY_GROUP,
                member_id="healthy",
                rebalance_timeout_ms=60_000,
                subscribed_topic_names=[HEALTHY_TOPIC],
                topic_partitions=[],
            )
            find = FindCoordinatorRequest(coordinator_keys=[HEALTHY_GROUP])
            async with asyncio.timeout(PATIENCE_SECONDS):
                while True:
                    await wire.call(find, 4)
                    joined = await wire.call(join, 1)
                    assert isinstance(joined, ConsumerGroupHeartbeatResponse)
                    if joined.error_code not in _NOT_LOADED:
                        break
            assert not joined.error_code, joined
            commit = await wire.call(self._commit(joined.member_epoch), 9)
            assert isinstance(commit, OffsetCommitResponse)
            assert not commit.topics[0].partitions[0].error_code, commit
            while True:
                await self._beat(wire, joined.member_epoch)
                await asyncio.sleep(CHECK_SECONDS)

    async def _beat(self, wire: Wire, epoch: int) -> None:
        beat = ConsumerGroupHeartbeatRequest(group_id=HEALTHY_GROUP, member_id="healthy", member_epoch=epoch)
        answer = await wire.call(beat, 1)
        assert isinstance(answer, ConsumerGroupHeartbeatResponse)
        assert (answer.error_code, answer.member_epoch) == (0, epoch), answer
        assert await committed_offset(wire) == 42
        self.beats += 1

    def _commit(self, epoch: int) -> OffsetCommitRequest:
        partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=42)
        topic = OffsetCommitRequest.OffsetCommitRequestTopic(name=HEALTHY_TOPIC, partitions=[partition])
        return OffsetCommitRequest(
            group_id=HEALTHY_GROUP, member_id="healthy", generation_id_or_member_epoch=epoch, topics=[topic]
        )


async def committed_offset(wire: Wire) -> int:
    """Returns the committed offset of the healthy group."""
    group = await _healthy_offsets(wire)
    assert not group.error_code, group
    return group.topics[0].partitions[0].committed_offset


async def committed_offset_once_loaded(wire: Wire) -> int:
    """Returns the committed offset of the healthy group, after its coordinator has loaded."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while (await _healthy_offsets(wire)).error_code in _NOT_LOADED:
            await asyncio.sleep(CHECK_SECONDS)
    return await committed_offset(wire)


async def _healthy_offsets(wire: Wire) -> OffsetFetchResponse.OffsetFetchResponseGroup:
    group = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=HEALTHY_GROUP, topics=None)
    answer = await wire.call(OffsetFetchRequest(groups=[group]), 8)
    assert isinstance(answer, OffsetFetchResponse)
    return answer.groups[0]
