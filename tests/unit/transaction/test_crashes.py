# SPDX-License-Identifier: Apache-2.0
"""Crashes between any two steps of a transaction: in the end it is committed everywhere or nowhere.

Three real parties take part: a transaction shard, which loses its unsynced records in a crash; a group shard; and the
partitions of a topic on a file system in memory. The tests run the steps between them, one step at a time.
"""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from kcoord.coordinator.transaction.work import WriteMarkers
from kcoord.runtime.result import Producer, Task
from kcoord.topics.fetch_session import FetchPartition
from kcoord.topics.partition import Marker
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import decode_records, iter_headers
from tests.unit.group.group_context import GroupContext
from tests.unit.group.test_transactional_offsets import GROUP, commit
from tests.unit.topics.helpers import TOPIC, Cluster, batch_of, image_of
from tests.unit.transaction.coordinator import TIMEOUT_MS, Coordinator

PARTITIONS = 2
OFFSETS_TOPIC = "__consumer_offsets"


class World:
    """One producer and its broker. Transactions are numbered, and each writes its number as record and offset."""

    def __init__(self, version: int) -> None:
        self.version = version
        self.coordinator = Coordinator()
        self.cluster = Cluster(image_of({TOPIC: PARTITIONS}))
        self.groups = GroupContext({"t3": 3})
        self.synced = 0
        self.marked: set[tuple[str, int]] = set()
        """The partitions that have the marker of the present transaction."""
        self.number = 0
        self.written: set[tuple[str, int]] = set()
        self.all_written: dict[int, set[tuple[str, int]]] = {}
        self.asked_to_commit: set[int] = set()
        self.acknowledged: set[int] = set()
        self.sequences: dict[int, int] = {}
        self.unanswered: tuple[Producer, bool] | None = None
        """The producer and the decision of an EndTxn whose response waits for the sync of the log."""
        self.producer = Producer(-1, -1)
        self.init()

    # The producer. A rejected request ends its transaction: it starts again with a new epoch.

    def init(self) -> None:
        for _ in range(4):
            try:
                response = self.coordinator.init()
            except KafkaError as error:
                assert error.error is Errors.CONCURRENT_TRANSACTIONS
                self.finish()
                continue
            self.sync()
            if not response.error_code:
                self.producer = Producer(response.producer_id, response.producer_epoch)
                self.begin()
                return
        raise AssertionError("a producer is never initialized")

    def begin(self) -> None:
        self.number += 1
        self.written = self.all_written[self.number] = set()
        self.sequences = {}

    def add(self, topic: str, partition: int) -> bool:
        """Adds a partition; returns False if the coordinator rejects it."""
        try:
            self.coordinator.add(self.producer, (topic, partition), version=2 if self.version >= 5 else 0)
        except KafkaError as error:
            if error.error is not Errors.CONCURRENT_TRANSACTIONS:
                self.init()
            return False
        return True

    def write(self, partition: int) -> None:
        if self.add(TOPIC, partition):
            self.sync()
            sequence = self.sequences.get(partition, 0)
            if not sequence and self.version < 5:
                self.sequences.update(self.last_sequences(partition))
                sequence = self.sequences.get(partition, 0)
            batch = batch_of(str(self.number), producer=(*self.producer, sequence), is_transactional=True)
            self.cluster.append(batch, partition=partition, verified=True)
            self.sequences[partition] = sequence + 1
            self.written.add((TOPIC, partition))

    def last_sequences(self, partition: int) -> dict[int, int]:
        """Returns the next sequence number of a producer that keeps its epoch and therefore its sequence."""
        for entry in self.cluster.store.active_producers(TOPIC, partition, self.cluster.now_ms):
            if entry.producer_id == self.producer.producer_id and entry.producer_epoch == self.producer.producer_epoch:
                return {partition: entry.last_sequence + 1}
        return {}

    def write_offset(self, partition: int) -> None:
        if self.add(OFFSETS_TOPIC, 0):
            self.sync()
            assert commit(self.groups, self.producer, {partition: self.number}) is Errors.NONE
            self.written.add((OFFSETS_TOPIC, partition))

    def end(self, committed: bool) -> None:
        if committed:
            self.asked_to_commit.add(self.number)
        if self.send_end(self.producer, committed):
            self.begin()

    def send_end(self, producer: Producer, committed: bool) -> bool:
        """Sends EndTxn; returns False if the coordinator rejects it."""
        length = len(self.coordinator.log)
        try:
            self.producer = self.coordinator.end(producer, committed=committed, version=self.version)
        except KafkaError as error:
            if error.error is Errors.PRODUCER_FENCED:
                self.init()
            return False
        if len(self.coordinator.log) > length:
            self.unanswered = producer, committed
        return True

    # The broker.

    def sync(self) -> None:
        self.synced = len(self.coordinator.log)
        self.unanswered = None

    def sync_end(self) -> None:
        """Makes the log durable, so that the response to EndTxn is sent."""
        self.sync()
        if self.coordinator.state.wire_name in ("PrepareCommit", "CompleteCommit"):
            self.acknowledged |= {number for number in self.asked_to_commit if number == self.number - 1}

    def task(self) -> Task | None:
        """Returns the task that may run, whose decision is durable; None if there is none."""
        return (
            self.coordinator.tasks[0] if self.coordinator.tasks and self.synced == len(self.coordinator.log) else None
        )

    def write_next_marker(self) -> None:
        """Writes the marker of the next partition; completes the task if all partitions have it."""
        task = self.task()
        if task is None:
            return
        work = task.work
        assert isinstance(work, WriteMarkers)
        places = [(topic, number) for topic, numbers in sorted(work.partitions.items()) for number in sorted(numbers)]
        left = [place for place in places if place not in self.marked]
        if left:
            self.write_marker(work, *left[0])
            self.marked.add(left[0])
        else:
            self.marked.clear()
            self.coordinator.complete()

    def write_marker(self, work: WriteMarkers, topic: str, partition: int) -> None:
        if topic == OFFSETS_TOPIC:
            self.groups.run(
                lambda context: self.groups.shard.end_transaction(context, work.producer, 7, committed=work.committed)
            )
            return
        marker = Marker(work.producer, 7, work.committed, work.transaction_version >= 2, work.attempt > 0)
        self.cluster.store.write_marker(topic, partition, marker, self.cluster.now_ms)

    def finish(self) -> None:
        self.sync_end()
        while self.task() is not None:
            self.write_next_marker()
            self.sync()

    def crash(self) -> None:
        del self.coordinator.log[self.synced :]
        self.marked.clear()
        self.coordinator.restart()
        self.synced = len(self.coordinator.log)
        self.cluster.crash()
        self.groups.restart()
        unanswered, self.unanswered = self.unanswered, None
        if not self.coordinator.shard.hard_state():
            self.init()
        elif unanswered is not None:  # A client that gets no response sends the request again.
            self.send_end(*unanswered)

    def time_out(self) -> None:
        self.coordinator.elapse(TIMEOUT_MS)

    # The final state.

    def visible(self) -> dict[int, set[tuple[str, int]]]:
        """Returns transaction -> partitions in which read_committed consumers see it."""
        partitions: dict[int, set[tuple[str, int]]] = {}
        for partition in range(PARTITIONS):
            for number in self.committed_values(partition):
                partitions.setdefault(number, set()).add((TOPIC, partition))
        return partitions

    def committed_values(self, partition: int) -> list[int]:
        request = FetchPartition(TOPIC, b"", partition, 0, 1 << 20, -1, -1)
        read = self.cluster.store.read(
            request, max_bytes=1 << 20, whole_first_batch=True, read_committed=True, now_ms=self.cluster.now_ms
        )
        assert read.last_stable_offset == read.high_watermark, "a transaction is still open"
        starts = {(aborted.producer_id, aborted.first_offset) for aborted in read.aborted_transactions or ()}
        aborting: set[int] = set()
        numbers = []
        for position, header in iter_headers(read.records):
            if (header.producer_id, header.base_offset) in starts:
                aborting.add(header.producer_id)
            if header.is_control:
                aborting.discard(header.producer_id)
            elif header.producer_id not in aborting:
                numbers += [int(record.value or b"") for record in decode_records(read.records, position)]
        return numbers


BY_ITSELF = ["sync", "marker", "marker", "marker", "crash", "crash", "time", "init", "finish"]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("write"), st.integers(0, PARTITIONS - 1)),
        st.tuples(st.just("offset"), st.integers(0, 2)),
        st.tuples(st.just("end"), st.booleans()),
        st.tuples(st.sampled_from(BY_ITSELF), st.just(0)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.sampled_from([4, 5]))
@example([("write", 0), ("end", False), ("crash", 0), ("end", True), ("sync", 0)], 4)
def test_a_transaction_is_committed_everywhere_or_nowhere(steps: list[tuple[str, int]], version: int) -> None:
    world = World(version)
    for kind, argument in steps:
        match kind:
            case "write":
                world.write(argument)
            case "offset":
                world.write_offset(argument)
            case "end":
                world.end(bool(argument))
            case "sync":
                world.sync_end()
            case "marker":
                world.write_next_marker()
            case "crash":
                world.crash()
            case "time":
                world.time_out()
            case "init":
                world.init()
            case _:
                world.finish()
    world.crash()
    world.finish()
    world.time_out()
    world.finish()
    assert world.coordinator.state.is_between_transactions
    visible = world.visible()
    for number, written in world.all_written.items():
        in_topic = {place for place in written if place[0] == TOPIC}
        assert visible.get(number, set()) in (set(), in_topic)
        if number not in world.asked_to_commit:
            assert number not in visible
        if number in world.acknowledged:
            assert visible.get(number, set()) == in_topic
    pending = world.groups.shard.hard_state()["pending"]
    assert pending == {"open": {}, "writers": {}}
    committed = set(world.groups.fetch(GROUP).values()) if world.groups.log else set()
    for offset, _ in committed:
        assert offset in world.asked_to_commit
        in_topic = {place for place in world.all_written[offset] if place[0] == TOPIC}
        assert visible.get(offset, set()) == in_topic
