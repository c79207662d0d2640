# SPDX-License-Identifier: Apache-2.0
"""The invariants of instances in front of an upstream; `docs/simulation.md` lists them by number.

They compare what clients are told, and what owners and standbys have in memory, with the partitions of the upstream.
The truth is `ModelPartition.written`: all batches in order, also those that compaction has removed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.upstream_batches import CLAIM_KEY
from kcoord.runtime.upstream_claim import UpstreamState
from kcoord.runtime.upstream_reader import BatchId, UpstreamReader
from kcoord.simulation.trace import ViolationError
from kcoord.simulation.upstream.brokers import UpstreamBrokers
from kcoord.simulation.upstream.instance import InstanceProcess, SimulatedInstance
from kcoord.simulation.upstream.meaning import CommitKey, Meaning, commits_of, writer_of
from kcoord.simulation.upstream.partition import ModelPartition, entries_of
from kcoord_protocol.record_batch import BatchHeader

_OWNER_AT: Final = 2
"""The name of an owner in its claim follows the version."""


@dataclass(slots=True)
class _Written:
    """A batch below the high watermark, with the claim before it."""

    header: BatchHeader
    data: bytes
    claimed_id: tuple[int, int]
    owner: str


class ReadPartition:
    """All batches of one partition below the high watermark, and their meanings. Follows a truncation."""

    def __init__(self, partition: Callable[[], ModelPartition]) -> None:
        self._partition = partition
        self._reset()

    def _reset(self) -> None:
        self.batches: list[_Written] = []
        self.mine = Meaning(knows_claims=True)
        self.foreign = Meaning(knows_claims=False)

    def follow(self) -> ModelPartition:
        """Takes the batches that are new, and returns the partition."""
        partition = self._partition()
        written, count = partition.written, len(self.batches)
        if count > len(written) or (count and written[count - 1][1] is not self.batches[-1].data):
            self._reset()
        for header, data in written[len(self.batches) :]:
            if header.next_offset > partition.high_watermark:
                break
            last = self.batches[-1] if self.batches else None
            claimed_id, owner = (last.claimed_id, last.owner) if last is not None else ((-1, -1), "")
            _, key, value = entries_of(data)[0]
            is_own = not header.is_control and not header.is_transactional
            if is_own and key is not None and key.startswith(CLAIM_KEY) and value is not None:
                claimed_id = header.producer_id, header.producer_epoch
                owner = value[_OWNER_AT:].decode()
            self.batches.append(_Written(header, data, claimed_id, owner))
            self.mine.take(header, data)
            self.foreign.take(header, data)
        return partition

    @property
    def owner(self) -> str:
        """The name in the last claim."""
        return self.batches[-1].owner if self.batches else ""

    def find(self, key: CommitKey, offset: int) -> _Written | None:
        """Returns the last batch that commits this offset."""
        for written in reversed(self.batches):
            if not written.header.is_control and any(
                (committed, value) == (key, offset) for _, committed, value in commits_of(written.data)
            ):
                return written
        return None


class UpstreamChecks:
    """All checks of a run. `violation` is the first one that was found."""

    def __init__(self, brokers: UpstreamBrokers, instances: Sequence[SimulatedInstance]) -> None:
        self.violation: ViolationError | None = None
        self.compared = 0
        """How often a state in memory was compared with the upstream."""
        self._brokers = brokers
        self._instances = instances
        self._acknowledged: dict[CommitKey, int] = {}
        self._latest: dict[CommitKey, int] = {}
        """The last offsets that were acknowledged outside of transactions. Each client commits larger ones."""
        self.partitions = [
            ReadPartition(lambda index=index: brokers.partitions[index])  # type: ignore[misc]
            for index in range(len(brokers.partitions))
        ]

    def violated(self, error: ViolationError) -> None:
        self.violation = self.violation or error

    # Responses to clients.

    def answered(self, process: InstanceProcess) -> None:
        """U-5: an instance that the group has removed answers nothing from its state."""
        if process.node_id not in self._brokers.group.members and not process.has_slow_clock:
            text = f"{process.owner} serves, but the group of the instances has removed it"
            self.violated(ViolationError("U-5 no lease, no answer", text))

    def acknowledged(self, process: InstanceProcess, shard_id: int, key: CommitKey, offset: int) -> None:
        """U-1 and U-2: the commit is in the log, and was written by the instance that acknowledges it."""
        self.answered(process)
        read = self.partitions[shard_id]
        read.follow()
        written = read.find(key, offset)
        if written is None:
            if not self._brokers.lost_records:
                text = f"{process.owner} acknowledges {key}={offset}, which the upstream does not have"
                self.violated(ViolationError("U-1 acknowledged commits are durable", text))
            return
        header = written.header
        claim = writer_of(written.data)[0] if header.is_transactional else (header.producer_id, header.producer_epoch)
        if claim != written.claimed_id or written.owner != process.owner:
            text = (
                f"{process.owner} acknowledges {key}={offset}, which was written under the claim {claim} "
                f"while {written.owner} owned the shard under {written.claimed_id}"
            )
            self.violated(ViolationError("U-2 only the owner acknowledges", text))
        self._acknowledged[key] = offset
        if not header.is_transactional:
            self._latest[key] = offset

    def fetched(self, process: InstanceProcess, shard_id: int, key: CommitKey, offset: int) -> None:
        """U-1: what a client reads is in the log."""
        self.answered(process)
        read = self.partitions[shard_id]
        read.follow()
        if offset >= 0 and read.find(key, offset) is None and not self._brokers.lost_records:
            text = f"{process.owner} returns {key}={offset}, which the upstream does not have"
            self.violated(ViolationError("U-1 acknowledged commits are durable", text))

    # What is in memory.

    def compare(self) -> None:
        """U-3 and U-4: the state of the owner, and that of each standby, is what the log means."""
        for process in self._processes():
            for shard_id, read in enumerate(self.partitions):
                partition = read.follow()
                if _is_quiet(process, shard_id, partition):
                    machine = process.machine_of(shard_id)
                    assert machine is not None
                    self._compare("U-3 the owner has what the log has", process, machine, read)
                    self._compare_readers(read)
                standby = process.broker.groups.shards.standbys.get(shard_id)
                if standby is not None and not standby.is_paused and _is_at_end(standby.reader, partition):
                    self._compare("U-4 standbys have what the log has", process, standby.loader.machine, read)

    def check_order(self, shared_group: str) -> None:
        """U-1: no commit that was sent earlier replaces an acknowledged one. In a shared group, transactions may."""
        if self._brokers.lost_records:
            return
        for read in self.partitions:
            offsets = read.mine.offsets()
            for key, offset in self._latest.items():
                if key[0] != shared_group and offsets.get(key, offset) < offset:
                    text = f"{key}={offset} was acknowledged, and an earlier commit has replaced it: {offsets[key]}"
                    raise ViolationError("U-1 acknowledged commits are durable", text)

    def _processes(self) -> Iterator[InstanceProcess]:
        for instance in self._instances:
            if instance.process is not None and instance.process.has_begun:
                yield instance.process

    def _compare(
        self, invariant: str, process: InstanceProcess, machine: GroupCoordinatorShard, read: ReadPartition
    ) -> None:
        self.compared += 1
        state = machine.hard_state()
        offsets = {(group, topic): offset.offset for (group, topic, _), offset in state["offsets"].items()}  # type: ignore[attr-defined]
        if offsets != read.mine.offsets():
            text = f"{process.owner} has {offsets}, the log means {read.mine.offsets()}"
            self.violated(ViolationError(invariant, text))
        pending = {(key.group_id, key.topic) for key in state["pending"]["writers"]}  # type: ignore[index]
        if pending != read.mine.unstable():
            text = f"pending at {process.owner} are {pending}, in the log {read.mine.unstable()}"
            self.violated(ViolationError(invariant, text))

    def _compare_readers(self, read: ReadPartition) -> None:
        """U-6: void records of a key are superseded, unless offsets of the key are pending."""
        mine, foreign = read.mine, read.foreign
        for key in {*mine.committed, *foreign.committed} - mine.unstable():
            offset, other = mine.offsets().get(key), foreign.offsets().get(key)
            if offset != other:
                text = f"readers that know nothing of claims have {other} for {key}, and not {offset}"
                self.violated(ViolationError("U-6 all readers agree", text))

    def settled(self) -> str:
        """Returns why the shards are not served by their owners yet, empty if they are."""
        for shard_id, read in enumerate(self.partitions):
            partition = read.follow()
            serving = [process for process in self._processes() if _is_quiet(process, shard_id, partition)]
            if [process.owner for process in serving] != [read.owner]:
                return f"shard {shard_id} is served by {[process.owner for process in serving]}, not by {read.owner}"
            for process in self._processes():
                standby = process.broker.groups.shards.standbys.get(shard_id)
                if process not in serving and (standby is None or standby.lag != 0):
                    return f"the standby of shard {shard_id} at {process.owner} lags"
        return ""

    def check_acknowledged(self) -> None:
        """U-1 at the end: everything that was acknowledged is still in the log."""
        if self._brokers.lost_records:
            return
        for key, offset in self._acknowledged.items():
            if not any(read.find(key, offset) for read in self.partitions):
                text = f"{key}={offset} was acknowledged, and the upstream does not have it any more"
                raise ViolationError("U-1 acknowledged commits are durable", text)


def _is_quiet(process: InstanceProcess, shard_id: int, partition: ModelPartition) -> bool:
    """True if the process is the owner, and its state in memory should be that of the partition."""
    shard = process.broker.groups.shards.active(shard_id)
    log = process.log.logs.get(shard_id)
    if shard is None or log is None or shard.is_behind or log.state is not UpstreamState.OWNER:
        return False
    return _is_at_end(log.reader, partition)


def _is_at_end(reader: UpstreamReader, partition: ModelPartition) -> bool:
    """True if the last batch that was read is the last one of the partition."""
    if reader.last is None or not reader.is_verified or not partition.batches:
        return False
    is_same = reader.last.is_same(BatchId.of(partition.batches[-1][0]))
    return is_same and reader.position == partition.end_offset == partition.high_watermark
