# SPDX-License-Identifier: Apache-2.0
"""Members that commit all the time, in a process of its own: `python -m tests.failover.load FILE GROUPS MEMBERS ...`.

Each group has MEMBERS members of KIP-848, and member number N commits offsets of partition N of the topic, each one
more than the last. There is one request of a member in flight. All members share one connection to each instance. If a
request fails, or if any instance names another coordinator, the member sends it again. Then the first member of each
group commits at once, also if it has just committed, and the others after a random part of SPREAD_SECONDS, as clients
do. So the times in the ledger are those of the instances, and not those of this process, in which thousands of members
share one thread.

The ledger is a text file. A line is an acknowledged commit, `ack GROUP PARTITION OFFSET NODE SENT ANSWERED` with the
times of the monotonic clock, or `lost GROUP PARTITION ERROR` if the coordinator has forgotten a member. `ready` stands
for the first commit of every member.
"""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, TextIO

from kcoord.client import AdminClient
from kcoord.client.admin.model import NewTopic
from kcoord.client.connection import Connection, open_connection
from kcoord.client.tasks import Tasks, spawn
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
)

TOPIC: Final = "load"
ANSWER_MS: Final = 5_000
WATCH_SECONDS: Final = 0.05
RETRY_SECONDS: Final = 0.02
SPREAD_SECONDS: Final = 1.0
HEARTBEAT_SECONDS: Final = 4.0
FLUSH_SECONDS: Final = 0.05
_HEARTBEAT_VERSION: Final = 1
_COMMIT_VERSION: Final = 9
_FIND_VERSION: Final = 4
_FORGOTTEN: Final = frozenset({Errors.UNKNOWN_MEMBER_ID, Errors.FENCED_MEMBER_EPOCH, Errors.GROUP_ID_NOT_FOUND})

Address = tuple[str, int]


class Connections:
    """One connection to each instance. One that fails is opened again by its next use.

    All uses of the same time share one attempt, and its failure.
    """

    def __init__(self) -> None:
        self._open: dict[Address, Connection] = {}
        self._attempts: dict[Address, asyncio.Task[Connection]] = {}

    async def to(self, address: Address) -> Connection:
        connection = self._open.get(address)
        if connection is not None and not connection.is_closed:
            return connection
        attempt = self._attempts.get(address)
        if attempt is None:
            attempt = self._attempts[address] = asyncio.create_task(self._connect(address))
            attempt.add_done_callback(lambda done: self._attempted(address, done))
        return await asyncio.shield(attempt)

    def _attempted(self, address: Address, attempt: asyncio.Task[Connection]) -> None:
        del self._attempts[address]
        if not attempt.cancelled():
            # Nobody may wait for it any more, and asyncio would log a failure that nobody has seen.
            attempt.exception()

    async def _connect(self, address: Address) -> Connection:
        connection = self._open[address] = await open_connection(
            *address,
            client_id="failover",
            request_timeout_ms=ANSWER_MS,
            connect_timeout_ms=ANSWER_MS,
            max_frame_bytes=1 << 24,
        )
        return connection


class Place(NamedTuple):
    """The coordinator of a group. `is_gone` is done when an instance names another one."""

    node_id: int
    address: Address
    is_gone: asyncio.Future[None]


class Coordinators:
    """The coordinators of all groups. All instances are asked for them all the time."""

    def __init__(self, connections: Connections, addresses: Sequence[Address], groups: Sequence[str]) -> None:
        self._connections = connections
        self._addresses = addresses
        self._request = FindCoordinatorRequest(coordinator_keys=list(groups))
        self._places: dict[str, Place] = {}
        self._changed = asyncio.Event()

    async def of(self, group: str) -> Place:
        while group not in self._places:
            await self._changed.wait()
        return self._places[group]

    def forget(self, group: str) -> None:
        """Waits for the next answer about a group, because its coordinator has not served it."""
        place = self._places.pop(group, None)
        if place is not None and not place.is_gone.done():
            place.is_gone.set_result(None)

    def watch(self) -> list[asyncio.Task[None]]:
        return [spawn(self._watch(address), f"coordinators at {address}") for address in self._addresses]

    async def _watch(self, address: Address) -> None:
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                connection = await self._connections.to(address)
                answer = await connection.call_version(self._request, FindCoordinatorResponse, _FIND_VERSION)
            except KafkaError:
                continue
            for coordinator in answer.coordinators:
                if not coordinator.error_code:
                    self._take(coordinator.key, coordinator.node_id, (coordinator.host, coordinator.port))
            self._changed.set()
            self._changed = asyncio.Event()

    def _take(self, group: str, node_id: int, address: Address) -> None:
        place = self._places.get(group)
        if place is None or place.node_id != node_id:
            self.forget(group)
            self._places[group] = Place(node_id, address, asyncio.get_running_loop().create_future())


class Member:
    """One member of a group; the module describes it."""

    def __init__(self, load: Load, group: str, index: int) -> None:
        self._load = load
        self._group = group
        self._index = index
        self._id = f"{group}-{index}"
        self._epoch = 0
        self._owned: list[ConsumerGroupHeartbeatRequest.TopicPartitions] = []
        self._tells_owned = True
        """Whether the next heartbeat has the owned partitions: the coordinator may not know them."""
        self._offset = 0
        self._heartbeat_at = 0.0

    async def run(self) -> None:
        node_id = None
        while True:
            place = await self._load.coordinators.of(self._group)
            if self._index and node_id not in (None, place.node_id):
                await asyncio.sleep(random.uniform(0, SPREAD_SECONDS))
            node_id = place.node_id
            step = asyncio.ensure_future(self._step(place))
            await asyncio.wait([step, place.is_gone], return_when=asyncio.FIRST_COMPLETED)
            if not step.done():
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)
                continue
            error = step.exception()
            if error is None:
                await self._pause(place)
                continue
            if not isinstance(error, KafkaError):
                raise error
            if error.error is Errors.STALE_MEMBER_EPOCH:
                self._heartbeat_at = 0
            elif error.error in _FORGOTTEN:
                self._load.lost(f"{self._group} {self._index} {error.error.name}")
                self._epoch, self._heartbeat_at, self._owned = 0, 0, []
            elif error.error is not Errors.COORDINATOR_LOAD_IN_PROGRESS:
                self._load.coordinators.forget(self._group)
            await asyncio.sleep(RETRY_SECONDS if self._index == 0 else random.uniform(RETRY_SECONDS, SPREAD_SECONDS))

    async def _pause(self, place: Place) -> None:
        """Waits until the next commit is due."""
        seconds = self._load.pause_seconds * random.uniform(0.5, 1.5)
        if self._index:
            await asyncio.sleep(seconds)
        else:
            await asyncio.wait([place.is_gone], timeout=seconds)

    async def _step(self, place: Place) -> None:
        connection = await self._load.connections.to(place.address)
        if not self._epoch:
            await self._beat(connection)
        await self._commit(connection, place.node_id)
        if time.monotonic() >= self._heartbeat_at:
            await self._beat(connection)

    async def _beat(self, connection: Connection) -> None:
        is_joining = self._epoch == 0
        owned = self._owned if self._tells_owned else None
        self._tells_owned = True
        request = ConsumerGroupHeartbeatRequest(
            group_id=self._group,
            member_id=self._id,
            member_epoch=self._epoch,
            rebalance_timeout_ms=60_000 if is_joining else -1,
            subscribed_topic_names=[TOPIC] if is_joining else None,
            topic_partitions=owned,
        )
        answer = await connection.call_version(request, ConsumerGroupHeartbeatResponse, _HEARTBEAT_VERSION)
        if answer.error_code:
            raise KafkaError(Errors(answer.error_code))
        self._epoch = answer.member_epoch
        self._tells_owned = answer.assignment is not None
        if answer.assignment is not None:
            self._owned = [
                ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id=topic.topic_id, partitions=topic.partitions)
                for topic in answer.assignment.topic_partitions
            ]
        pause_seconds = 0 if self._tells_owned else HEARTBEAT_SECONDS * random.uniform(0.5, 1)
        self._heartbeat_at = time.monotonic() + pause_seconds

    async def _commit(self, connection: Connection, node_id: int) -> None:
        offset = self._offset + 1
        request = commit_request(self._group, self._index, offset, self._id, self._epoch)
        sent = time.monotonic()
        answer = await connection.call_version(request, OffsetCommitResponse, _COMMIT_VERSION)
        code = answer.topics[0].partitions[0].error_code
        if code:
            raise KafkaError(Errors(code))
        if not self._offset:
            self._load.first_commit()
        self._offset = offset
        self._load.write(f"ack {self._group} {self._index} {offset} {node_id} {sent:.6f} {time.monotonic():.6f}")


def commit_request(
    group: str, partition: int, offset: int, member_id: str = "", epoch: int = -1
) -> OffsetCommitRequest:
    return OffsetCommitRequest(
        group_id=group,
        member_id=member_id,
        generation_id_or_member_epoch=epoch,
        topics=[
            OffsetCommitRequest.OffsetCommitRequestTopic(
                name=TOPIC,
                partitions=[
                    OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=partition, committed_offset=offset)
                ],
            )
        ],
    )


class Load:
    """All members."""

    def __init__(
        self, ledger: TextIO, addresses: Sequence[Address], groups: Sequence[str], pause_seconds: float, members: int
    ) -> None:
        self.connections = Connections()
        self.coordinators = Coordinators(self.connections, addresses, groups)
        self.pause_seconds = pause_seconds
        self._ledger = ledger
        self._missing = members
        self._lines: list[str] = []

    def write(self, line: str) -> None:
        self._lines.append(line)

    def lost(self, member: str) -> None:
        """Notes a member that the coordinator does not know any more, unless members are still joining."""
        if not self._missing:
            self.write(f"lost {member}")

    def first_commit(self) -> None:
        self._missing -= 1
        if not self._missing:
            self.write("ready")

    def flush(self) -> None:
        if self._lines:
            self._ledger.write("\n".join(self._lines) + "\n")
            self._ledger.flush()
            self._lines.clear()


async def run(file: Path, groups: int, members: int, pause_seconds: float, addresses: Sequence[Address]) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with AdminClient(bootstrap_servers=[f"{host}:{port}" for host, port in addresses]) as admin:
        await admin.create_topics([NewTopic(TOPIC, members)])
    with file.open("w") as ledger:
        names = [f"group{number}" for number in range(groups)]
        load = Load(ledger, addresses, names, pause_seconds, groups * members)
        tasks = Tasks()
        for watch in load.coordinators.watch():
            tasks.add(watch)
        for group in names:
            for index in range(members):
                tasks.add(spawn(Member(load, group, index).run(), "member"))
        while not stop.is_set():
            await asyncio.sleep(FLUSH_SECONDS)
            load.flush()
        await tasks.stop()
        load.flush()


def main() -> None:
    file, groups, members, pause_seconds, *addresses = sys.argv[1:]
    places = [(host, int(port)) for host, _, port in (address.rpartition(":") for address in addresses)]
    asyncio.run(run(Path(file), int(groups), int(members), float(pause_seconds), places))


if __name__ == "__main__":
    main()
