# SPDX-License-Identifier: Apache-2.0
"""What a shard set owns, and when it loads: without event loop, clock and IO."""

from __future__ import annotations

import errno

import pytest

from kcoord.runtime.result import OperationContext
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_log import Append, Load, OpenedLog
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.waiting import Ready, ShardState
from kcoord_protocol.errors import Errors, KafkaError
from tests.unit.runtime.ledger import Ledger

TOPIC = b"t" * 16


class Owner:
    """Calls a set of three shards by hand."""

    def __init__(self) -> None:
        self.now_ms = 1_000
        self.shards: ShardSet[Ledger] = ShardSet(lambda _: Ledger(), CoordinatorSerde(), configured_shards=3)

    def poll(self) -> Ready:
        return self.shards.poll(self.now_ms)

    def follow(self, *led: int) -> list[int]:
        return self.shards.follow(TOPIC, 3, led, (), self.now_ms)

    def load(self) -> list[int]:
        """Lets every load that is due through; returns the shards in the order in which they were opened."""
        opened = []
        while True:
            ready = self.poll()
            for load in ready.opens:
                opened.append(load.shard_id)
                self.shards.opened(load, OpenedLog(0, 0))
            for load in ready.reads:
                self.shards.read(load, (), self.now_ms, is_end=True)
            if not ready.opens and not ready.reads:
                return opened

    def put(self, shard_id: int) -> Append:
        self.shards.run(shard_id, lambda ledger, context, _: ledger.put(context, "a", 1), None, OperationContext(0))
        (append,) = self.poll().appends
        return append

    def error(self, shard_id: int) -> Errors:
        with pytest.raises(KafkaError) as caught:
            self.shards.run(shard_id, lambda ledger, context, _: ledger.get(context, "a"), None, OperationContext(0))
        return caught.value.error


@pytest.fixture
def owner() -> Owner:
    owner = Owner()
    assert owner.follow(0, 1, 2) == [0, 1, 2]
    assert owner.load() == [0, 1, 2], "one after the other"
    return owner


def first_open(owner: Owner) -> Load:
    (load,) = owner.poll().opens
    return load


def test_shards_are_loading_until_their_logs_are_read() -> None:
    owner = Owner()
    owner.follow(0, 1)
    assert owner.error(1) is Errors.COORDINATOR_LOAD_IN_PROGRESS
    assert owner.error(2) is Errors.NOT_COORDINATOR
    assert first_open(owner).shard_id == 0
    assert not owner.poll().opens, "the next one waits for its turn"


def test_shards_whose_logs_are_empty_are_active_at_once() -> None:
    owner = Owner()
    assert owner.shards.follow(TOPIC, 3, (0, 1, 2), {0, 2}, owner.now_ms) == [1]
    assert [owner.shards.state(shard_id) for shard_id in (0, 2)] == [ShardState.ACTIVE] * 2


def test_the_time_until_the_next_attempt_doubles_up_to_a_minute() -> None:
    owner = Owner()
    owner.follow(0)
    waited = []
    for _ in range(8):
        load = first_open(owner)
        owner.shards.failed(load, OSError("damaged"), owner.now_ms)
        assert owner.poll().closes == [0]
        deadline_ms = owner.shards.next_deadline_ms()
        assert deadline_ms is not None
        waited.append((deadline_ms - owner.now_ms) // 1_000)
        assert not owner.shards.has_ready(deadline_ms - 1)
        owner.now_ms = deadline_ms
    assert waited == [1, 2, 4, 8, 16, 32, 60, 60]
    assert owner.load() == [0]
    append = owner.put(0)
    owner.shards.unknown(append, OSError(errno.EIO, "broken"), owner.now_ms)
    owner.poll()
    assert owner.shards.next_deadline_ms() == owner.now_ms + 1_000, "a success ends that"


def test_a_log_that_another_owner_holds_is_asked_for_again_soon() -> None:
    owner = Owner()
    owner.follow(0)
    owner.shards.held(first_open(owner), owner.now_ms)
    assert owner.error(0) is Errors.COORDINATOR_LOAD_IN_PROGRESS
    assert owner.shards.next_deadline_ms() == owner.now_ms + 50
    owner.now_ms += 50
    assert owner.load() == [0]


def test_a_full_disk_is_read_at_once_but_not_again_and_again(owner: Owner) -> None:
    owner.shards.unknown(owner.put(0), OSError(errno.ENOSPC, "full"), owner.now_ms)
    owner.poll()
    assert owner.error(0) is Errors.NOT_COORDINATOR
    assert owner.shards.next_deadline_ms() == owner.now_ms
    assert owner.load() == [0]
    with pytest.raises(KafkaError):
        owner.put(0)
    owner.poll()
    assert owner.shards.state(0) is ShardState.FAILED
    owner.now_ms += 249
    assert owner.load() == []
    owner.now_ms += 1
    assert owner.load() == [0]


def test_a_shard_is_given_away_when_nothing_of_it_is_under_way(owner: Owner) -> None:
    append = owner.put(1)
    owner.follow(0, 2)
    assert owner.error(1) is Errors.NOT_COORDINATOR
    assert not owner.poll().releases
    assert owner.follow(0, 1, 2) == [], "its log is still open here"
    owner.shards.written(append)
    (release,) = owner.poll().releases
    assert (list(release.shard_ids), release.deleted_topic_id) == ([1], None)
    assert not owner.poll().releases
    owner.shards.released(release)
    assert owner.poll().has_released
    assert owner.follow(0, 1, 2) == [1]
    assert owner.load() == [1]


def test_a_shard_that_was_lost_while_its_log_was_opened_is_given_away_after_that() -> None:
    owner = Owner()
    owner.follow(0)
    load = first_open(owner)
    owner.follow()
    assert not owner.poll().releases
    owner.shards.opened(load, OpenedLog(0, 0))
    ready = owner.poll()
    assert len(ready.releases) == 1
    assert not ready.reads
    assert owner.shards.state(0) is ShardState.CLOSED


def test_a_deleted_topic_is_given_up_and_can_be_made_again(owner: Owner) -> None:
    assert owner.shards.follow(None, 0, (), (), owner.now_ms) == []
    assert owner.shards.follow(b"n" * 16, 2, (0, 1), (), owner.now_ms) == [], "the old logs are still there"
    (release,) = owner.poll().releases
    assert (list(release.shard_ids), release.deleted_topic_id) == ([0, 1, 2], TOPIC)
    owner.shards.released(release)
    assert owner.shards.follow(b"n" * 16, 2, (0, 1), (), owner.now_ms) == [0, 1]
    assert owner.load() == [0, 1]


def test_a_shard_that_failed_and_was_given_away_is_not_loaded_again(owner: Owner) -> None:
    owner.shards.fail_shard(1, "a test")
    owner.follow(0, 2)
    owner.poll()
    owner.now_ms += 60_000
    assert owner.load() == []
    assert owner.shards.state(1) is ShardState.CLOSED


def test_after_the_end_nothing_is_loaded(owner: Owner) -> None:
    owner.shards.fail_shard(1, "a test")
    owner.shards.close()
    owner.poll()
    owner.now_ms += 60_000
    assert owner.load() == []
