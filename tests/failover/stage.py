# SPDX-License-Identifier: Apache-2.0
"""Instances in front of an upstream, with members that commit through them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from kcoord.client import AdminClient
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import FindCoordinatorRequest, FindCoordinatorResponse, OffsetCommitResponse
from tests.failover import next_release
from tests.failover.ledger import Ledger, Written, read_log
from tests.failover.load import commit_request
from tests.failover.seed import seed
from tests.integration.wire import WireClient
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.private_network import PrivateNetwork
from tests.support.shared import ROOT
from tests.support.waiting import wait_until

HEARTBEAT_MS = 200
FIRST_ID = 1_000_000
READY_SECONDS = 60.0
MOVED_SECONDS = 30.0
PROBED_GROUPS = 5
_LOST = "owns no shards any more, and acknowledges nothing"
INSTANCES = 2
GROUPS = (4001, 4002)
"""The group ids of the instances' processes in a private network."""


@dataclass(frozen=True, slots=True)
class Size:
    """The size of a test. The members of each group commit offsets all the time.

    `offsets`: the number of committed offsets in the log before the test. `margin_seconds`: the time that a takeover
    may take after the session of an instance is over. `stop_seconds`: that of a takeover after an orderly stop. The
    margins of the short form are wide, because the machine may be busy with other tests.
    """

    groups: int
    members: int
    pause_seconds: float
    shards: int
    session_ms: int
    offsets: int = 0
    margin_seconds: float = 3.0
    stop_seconds: float = 3.0


SHORT = Size(groups=16, members=2, pause_seconds=0.1, shards=8, session_ms=1_500)
LONG = Size(
    groups=100,
    members=20,
    pause_seconds=2.0,
    shards=50,
    session_ms=6_000,
    offsets=1_000_000,
    margin_seconds=0.5,
    stop_seconds=0.3,
)


def configured_size() -> Size:
    """Returns the size that this run has: `make failover` sets FAILOVER=long."""
    return LONG if os.environ.get("FAILOVER") == "long" else SHORT


class Probe:
    """Commits that only one instance gets. They belong to groups without members, of which it is the coordinator."""

    def __init__(self, stage: Stage, instance: KcoordProcess) -> None:
        self._client = WireClient(instance.port, MOVED_SECONDS)
        node_id = FIRST_ID + stage.instances.index(instance)
        names = [f"probe{number}" for number in range(100)]
        answer = self._client.call(FindCoordinatorRequest(coordinator_keys=names), 4, FindCoordinatorResponse)
        own = [place.key for place in answer.coordinators if place.node_id == node_id]
        self._groups = own[:PROBED_GROUPS]
        assert len(self._groups) == PROBED_GROUPS
        self._sent: list[int] = []
        self._offset = int(time.time())
        self.send()
        assert set(self.errors()) == {Errors.NONE}

    def __enter__(self) -> Probe:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.__exit__()

    def send(self) -> None:
        """Sends a commit of each group."""
        self._offset += 1
        self._sent += [self._client.send(commit_request(group, 0, self._offset), 8) for group in self._groups]

    def errors(self) -> list[Errors]:
        """Returns the answers to the commits that were sent."""
        answers = [self._client.receive(number, ApiKey.OFFSET_COMMIT, 8, OffsetCommitResponse) for number in self._sent]
        self._sent.clear()
        return [Errors(answer.topics[0].partitions[0].error_code) for answer in answers]


class Stage:
    """The instances of a test, its load, and its ledger."""

    def __init__(self, folder: Path, address: str, groups: Sequence[int]) -> None:
        size = configured_size()
        self.address = address
        self.size = size
        self.folder = folder
        self.instances = [self._instance(number, groups) for number in range(INSTANCES)]
        self._load: subprocess.Popen[bytes] | None = None
        self._late: list[str] = []
        """The takeovers that took longer than they may."""

    def _instance(self, number: int, groups: Sequence[int]) -> KcoordProcess:
        folder = self.folder / f"instance{number}"
        folder.mkdir()
        instance = KcoordProcess(
            folder,
            {
                **FAST,
                "group.consumer.session.timeout.ms": "45000",
                "group.consumer.heartbeat.interval.ms": "5000",
                "node.id": str(FIRST_ID + number),
                "offsets.topic.num.partitions": str(self.size.shards),
                "kcoord.upstream.bootstrap.servers": self.address,
                "kcoord.upstream.ports": "0",
                "kcoord.upstream.session.timeout.ms": str(self.size.session_ms),
                "kcoord.upstream.heartbeat.interval.ms": str(HEARTBEAT_MS),
            },
        )
        instance.group = groups[number] if groups else None
        return instance

    @property
    def ledger(self) -> Ledger:
        return Ledger.read(self.folder / "ledger.txt")

    async def start(self) -> None:
        """Starts the instances and the load. Returns when every member has committed, and every instance has groups."""
        if self.size.offsets:
            await seed(self.address, self.size.shards, self.size.offsets)
        with ThreadPoolExecutor() as threads:
            list(threads.map(KcoordProcess.start, self.instances))
        addresses = [instance.address for instance in self.instances]
        numbers = [str(self.size.groups), str(self.size.members), str(self.size.pause_seconds)]
        self._load = subprocess.Popen(
            [sys.executable, "-m", "tests.failover.load", str(self.folder / "ledger.txt"), *numbers, *addresses],
            cwd=ROOT,
        )
        wait_until(lambda: self.ledger.is_ready, "all members have committed", READY_SECONDS)
        self.until_shared()

    def until_shared(self) -> None:
        """Waits until every instance serves groups."""
        since = time.monotonic()
        ids = {FIRST_ID + number for number in range(INSTANCES)}
        wait_until(
            lambda: {ack.node_id for ack in self.ledger.acks if ack.sent > since} == ids, "every instance serves groups"
        )
        # A map that has just changed may change again: instances announce their ports of new brokers.
        time.sleep(2 * HEARTBEAT_MS / 1000)

    def stop(self) -> None:
        """Stops everything that runs."""
        if self._load is not None:
            self._load.kill()
            self._load.wait()
        for instance in self.instances:
            if instance.is_running:
                os.kill(instance.pid, signal.SIGCONT)
            instance.stop()

    # What happens to an instance.

    def kill(self, victim: KcoordProcess) -> None:
        """Kills an instance, and starts it again when others serve its groups."""
        since = time.monotonic()
        victim.kill()
        self._until_moved(victim, since, self.size.session_ms / 1000 + self.size.margin_seconds, "kill -9")
        victim.start()
        self.until_shared()

    def terminate(self, victim: KcoordProcess) -> None:
        """Stops an instance in order, and starts it again when others serve its groups."""
        since = time.monotonic()
        assert victim.stop() == 0
        self._until_moved(victim, since, self.size.stop_seconds, "SIGTERM")
        victim.start()
        self.until_shared()

    def pause(self, victim: KcoordProcess) -> None:
        """Stops a process for longer than its session. Requests that it finds afterwards are not acknowledged."""
        with self._away(victim) as probe:
            since = time.monotonic()
            os.kill(victim.pid, signal.SIGSTOP)
            probe.send()
            self._until_moved(victim, since, self.size.session_ms / 1000 + self.size.margin_seconds, "SIGSTOP")
            os.kill(victim.pid, signal.SIGCONT)
            assert set(probe.errors()) == {Errors.NOT_COORDINATOR}

    def cut_off(self, victim: KcoordProcess, network: PrivateNetwork, ports: Sequence[int]) -> None:
        """Drops all packets between an instance and the upstream for longer than its session."""
        assert victim.group is not None
        with self._away(victim) as probe:
            since = time.monotonic()
            with network.split(victim.group, ports):
                probe.send()
                self._until_moved(victim, since, self.size.session_ms / 1000 + self.size.margin_seconds, "split")
                probe.send()
                errors = probe.errors()
                assert set(errors) <= {Errors.NOT_COORDINATOR, Errors.COORDINATOR_NOT_AVAILABLE}
                assert set(errors[PROBED_GROUPS:]) == {Errors.NOT_COORDINATOR}

    def until_served(self, since: float, event: str, seconds: float) -> None:
        """Waits until every group has a commit that was sent after `since`."""
        groups = {f"group{number}" for number in range(self.size.groups)}
        begun = time.monotonic()
        wait_until(lambda: {ack.group for ack in self.ledger.acks if ack.sent > since} == groups, event, seconds)
        print(f"{event}: all groups are served after {time.monotonic() - begun:.2f} s")

    @contextmanager
    def _away(self, victim: KcoordProcess) -> Iterator[Probe]:
        """Checks that the log of an instance has the loss of its shards, and waits until it has some again."""
        begin = len(victim.log)
        with Probe(self, victim) as probe:
            yield probe
        wait_until(lambda: _LOST in victim.log[begin:], "the instance has logged that it acknowledges nothing")
        self.until_shared()

    def _until_moved(self, victim: KcoordProcess, since: float, seconds: float, event: str) -> None:
        """Waits until other instances serve all groups of one. `judge` fails if that took longer than `seconds`."""
        node_id = FIRST_ID + self.instances.index(victim)
        gaps: dict[str, float] = {}

        def is_moved() -> bool:
            nonlocal gaps
            gaps = self.ledger.gaps(node_id, since)
            return bool(gaps) and max(gaps.values()) < float("inf")

        wait_until(is_moved, f"other instances serve the groups of {node_id} after {event}", MOVED_SECONDS)
        longest = max(gaps.values())
        print(f"{event}: {len(gaps)} groups, the last one is served by another instance after {longest:.2f} s")
        if longest >= seconds:
            self._late.append(f"{event}: {longest:.2f} s, but at most {seconds:g} s are allowed")

    def upgrade(self, instance: KcoordProcess) -> None:
        """Stops an instance if it runs, and starts it with the next release."""
        assert instance.stop() == 0
        instance.module = next_release.__name__
        instance.start()
        self.until_shared()

    async def judge(self) -> list[Written]:
        """Stops the load, and fails if an acknowledged commit is lost, or was not written by the owner of its log.

        Fails also if a takeover was late, after all else: its time depends on the machine. Returns all commits in the
        log.
        """
        assert self._load is not None
        self._load.send_signal(signal.SIGTERM)
        assert self._load.wait(20) == 0
        self._load = None
        ledger = self.ledger
        written = await read_log(self.address, self.size.shards)
        ledger.check(written)
        offsets = await self._committed()
        missing = {place: offset for place, offset in ledger.last_offsets().items() if offsets[place] < offset}
        assert not missing, f"{len(missing)} acknowledged commits are lost, such as {list(missing.items())[:3]}"
        assert not self._late, self._late
        return written

    async def _committed(self) -> dict[tuple[str, int], int]:
        groups = [f"group{number}" for number in range(self.size.groups)]
        async with AdminClient(bootstrap_servers=self.instances[0].address) as admin:
            answers = await admin.list_consumer_group_offsets(groups)
        return {
            (group, partition.partition): offset.offset
            for group in groups
            for partition, offset in answers[group].items()
            if offset is not None
        }


@asynccontextmanager
async def on_stage(folder: Path, address: str, groups: Sequence[int] = ()) -> AsyncIterator[Stage]:
    """Starts instances in front of `address`, and stops them. `groups`: the group ids of their processes."""
    stage = Stage(folder, address, groups)
    try:
        await stage.start()
        yield stage
    finally:
        stage.stop()
