# SPDX-License-Identifier: Apache-2.0
"""Random transactions, faults and power losses: the producer state is always the one that the log replays to.

Producer snapshots, transaction indexes and leader epochs only shorten a load. So after every step, the state of the
partition is compared with a state that is made from the batches alone.
"""

from __future__ import annotations

import errno
import random
from contextlib import suppress

import pytest

from kcoord.runtime.result import Producer
from kcoord.storage.memory_file_system import Operation, keep_everything, keep_nothing, no_fault
from kcoord.topics import partition_log
from kcoord.topics.log_opening import LogBeingOpenedError
from kcoord.topics.open_log import OpenLog, replay
from kcoord.topics.producer_state import ProducerState
from kcoord_protocol.errors import KafkaError
from tests.unit.topics.helpers import TOPIC, batch_of, image_of
from tests.unit.topics.test_log_opening import Restarted
from tests.unit.topics.test_transactions import after, end, write

STEPS = 40
CHECK_MS = 400_000
SMALL_FILES = (".txnindex", ".snapshot", "leader-epoch-checkpoint")


class Model(Restarted):
    """A partition with tiny segments. Each method is a step; the seed decides which comes next."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.epoch = 0
        self.durable = 0
        super().__init__([])
        self.lead()

    def lead(self) -> None:
        """The partition gets a new leader epoch."""
        self.epoch += 1
        configs = {TOPIC: {"internal.segment.bytes": "400", "flush.messages": "5", "retention.ms": "-1"}}
        self.update(image_of({TOPIC: 1}, configs=configs, leader_epoch=self.epoch))

    def opened(self) -> OpenLog:
        partition = self.store.partition(TOPIC, 0)
        with suppress(LogBeingOpenedError):
            return partition.open(self.now_ms)
        while self.thread.work:
            self.run_thread()
        return partition.open(self.now_ms)

    def write(self) -> None:
        producer_id = self.chance.randint(1, 4)
        entry = self.opened().producers.entries.get(producer_id)
        epoch, sequence = (entry.producer_epoch, entry.last_sequence + 1) if entry is not None else (0, 0)
        write(self, Producer(producer_id, epoch), sequence, "x" * self.chance.choice([1, 120]))

    def write_plainly(self) -> None:
        self.append(batch_of("y" * self.chance.choice([1, 120])))

    def end(self) -> None:
        producers = self.opened().producers
        if producers.open_transactions:
            producer_id = self.chance.choice(list(producers.open_transactions))
            producer = Producer(producer_id, producers.entries[producer_id].producer_epoch)
            end(self, after(producer), committed=self.chance.random() < 0.4, repeated=self.chance.random() < 0.3)

    def delete_records(self) -> None:
        log = self.opened().log
        self.store.delete_records(TOPIC, 0, self.chance.randint(log.start_offset, log.end_offset), self.now_ms)
        if self.chance.random() < 0.7:
            self.store.note_deleted()
            self.store.keep_deleted()
        if self.chance.random() < 0.5:
            self.tick(CHECK_MS)

    def run_thread(self) -> None:
        if self.thread.work:
            self.thread.run()

    def sync_closed_segments(self) -> None:
        while self.syncs.work:
            self.syncs.run()

    def fail_a_sync(self) -> None:
        """The next write notices the failure. (Only the process that saw it knows which bytes the kernel dropped.)"""
        fault, self.fs.fault = self.fs.fault, _failing_sync
        self.sync_closed_segments()
        self.fs.fault = fault
        self.write_plainly()

    def note_durable(self) -> None:
        self.log_dir.note_durable()
        self.log_dir.write_checkpoints()

    def fail(self) -> None:
        self.store.partition(TOPIC, 0).fail(AssertionError("broken"))

    def begin_fault(self) -> None:
        name = self.chance.choice(SMALL_FILES)
        self.fs.fault = lambda operation: _no_space(operation) if name in operation.path else None

    def end_fault(self) -> None:
        self.fs.fault = no_fault

    def stop_orderly(self) -> None:
        self.end_fault()
        self.restart()

    def lose_power(self) -> None:
        self.end_fault()
        self.thread.work.clear()
        self.syncs.work.clear()
        lost = self.chance.choice(SMALL_FILES)

        def keep_others(kind: str, path: str, pending: int) -> int:
            return 0 if kind == "zeros" or lost in path else pending

        self.fs.crash(self.chance.choice([keep_everything, keep_nothing, keep_others, self._keep_some]))
        self.start()

    def _keep_some(self, kind: str, path: str, pending: int) -> int:
        return 0 if kind == "zeros" else self.chance.randint(0, pending)

    def check(self) -> None:
        fault, self.fs.fault = self.fs.fault, no_fault
        opened = self.opened()
        self.fs.fault = fault
        log, producers, expected = opened.log, opened.producers, ProducerState()
        assert log.end_offset >= self.durable
        self.durable = log.flushed_offset
        for header, data in log.batches(opened.first_offset):
            replay(expected, header, data)
        # Of transactions that began before the first segment, the state may know more than the batches.
        aborts = {aborted[:3] for aborted in producers.aborted if aborted.first_offset >= opened.first_offset}
        assert aborts <= {aborted[:3] for aborted in expected.aborted}
        markers = [aborted.last_offset for aborted in producers.aborted]
        assert markers == sorted(set(markers))
        assert set(markers) >= {aborted.last_offset for aborted in expected.aborted}
        for producer_id in producers.open_transactions.keys() | expected.open_transactions.keys():
            first_offset = producers.open_transactions[producer_id]
            assert first_offset < opened.first_offset or first_offset == expected.open_transactions[producer_id]
        for producer_id, entry in expected.entries.items():
            own = producers.entries[producer_id]
            assert (own.producer_epoch, own.last_offset) == (entry.producer_epoch, entry.last_offset)
        for header, _ in log.batches(log.start_offset):
            assert opened.epochs.epoch_for_offset(header.last_offset) in (-1, header.partition_leader_epoch)


def _failing_sync(operation: Operation) -> OSError | None:
    return OSError(errno.EIO, "medium") if operation.kind == "datasync" else None


def _no_space(operation: Operation) -> OSError | None:
    fails = operation.kind in ("create", "write", "datasync", "remove")
    return OSError(errno.ENOSPC, "no space") if fails else None


@pytest.mark.parametrize("seed", range(200))
def test_the_producer_state_is_the_one_of_the_log(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition_log, "STORED_AT_ONCE", seed % 2)
    model = Model(seed)
    steps = [
        *[model.write] * 6,
        *[model.end] * 5,
        *[model.write_plainly] * 3,
        *[model.run_thread] * 3,
        *[model.sync_closed_segments] * 2,
        model.fail_a_sync,
        model.note_durable,
        model.delete_records,
        model.begin_fault,
        model.end_fault,
        model.lead,
        model.fail,
        model.crash,
        model.stop_orderly,
        *[model.lose_power] * 2,
    ]
    for _ in range(STEPS):
        # A write that is rejected, or that fails, changes nothing that `check` does not see.
        with suppress(KafkaError):
            model.chance.choice(steps)()
        model.check()
