# SPDX-License-Identifier: Apache-2.0
"""Random logs of a group coordinator with transactions and deletions, and the state after the coordinator's replay."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import NamedTuple, TypeAlias, cast

from hypothesis import strategies as st

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.classic.rebalance import group_metadata_record
from kcoord.coordinator.group.offsets.committed_offsets import CommittedOffset
from kcoord.coordinator.group.records import (
    TombstoneReason,
    new_classic_group_tombstone,
    new_group_epoch_record,
    new_group_epoch_tombstone,
)
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.runtime.shard_set import ShardSet
from kcoord_protocol.control_records import ControlRecordType, end_txn_marker
from kcoord_protocol.messages import GroupMetadataValue
from kcoord_protocol.record_batch import Record, decode_header, encode_batch, encode_control_batch
from tests.unit.logtools.support import NOW_MS, commit_record, commit_tombstone, record_of

OffsetOf: TypeAlias = tuple[str, str, int]
"""(group, topic, partition)."""

PRODUCERS = (7, 8)
NO_PRODUCER = -1
TOPIC = "orders"
PARTITIONS = 2

_NEW = st.just(False)
_GROUPS = ("g", "g", "g", "h")
_ANY = st.sampled_from((NO_PRODUCER, *PRODUCERS))
_TRANSACTIONAL = st.sampled_from(PRODUCERS)
_GROUP_STEPS = ("classic group", "consumer group", "classic group tombstone", "consumer group tombstone")
_KINDS = ("commit offsets", "delete offsets", "delete group", "commit", "abort", *_GROUP_STEPS)
_WEIGHTS = (8, 2, 1, 2, 1, *[0.25] * len(_GROUP_STEPS))


class Step(NamedTuple):
    """One batch of a log."""

    what: str
    group: str = "g"
    partition: int = 0
    producer_id: int = NO_PRODUCER
    width: int = 1
    is_old: bool = False
    """Whether the offset commits have the key type of old Kafka releases."""


def _steps(
    what: st.SearchStrategy[str], producers: st.SearchStrategy[int], old: st.SearchStrategy[bool] = _NEW
) -> st.SearchStrategy[Step]:
    places = st.integers(0, PARTITIONS - 1)
    return st.builds(Step, what, st.sampled_from(_GROUPS), places, producers, st.integers(1, PARTITIONS), old)


def logs(*, oddities: bool) -> st.SearchStrategy[list[Step]]:
    """Returns a strategy for logs.

    Oddities are tombstones in transactions, and keys of old releases. No broker writes them today, but a log may have
    them, and the coordinator has a rule for them. Logs for the log cleaner must not have them: it removes such
    tombstones with the rest of an aborted transaction, and treats the two key types as different keys.
    """
    deleting = _ANY if oddities else st.just(NO_PRODUCER)
    old = st.sampled_from((False, False, False, True)) if oddities else _NEW
    step = st.one_of(
        _steps(st.just("commit offsets"), st.just(NO_PRODUCER), old),
        *[_steps(st.just("commit offsets"), _TRANSACTIONAL, old)] * 3,
        _steps(st.just("delete offsets"), deleting, old),
        _steps(st.just("delete group"), st.just(NO_PRODUCER)),
        _steps(st.sampled_from(_GROUP_STEPS), st.just(NO_PRODUCER)),
        *[_steps(st.sampled_from(("commit", "commit", "abort")), _TRANSACTIONAL)] * 2,
    )
    return st.lists(step, min_size=10, max_size=40)


def random_log(random: Random, length: int) -> list[Step]:
    """Returns a log of `length` steps, after which every transaction has ended."""
    steps = []
    for _ in range(length):
        what = random.choices(_KINDS, _WEIGHTS)[0]
        producer_id = NO_PRODUCER
        if what in ("commit", "abort") or (what == "commit offsets" and random.random() < 0.75):
            producer_id = random.choice(PRODUCERS)
        group, partition = random.choice(_GROUPS), random.randrange(PARTITIONS)
        steps.append(Step(what, group, partition, producer_id, random.randint(1, PARTITIONS)))
    return steps + [Step("commit", producer_id=producer_id) for producer_id in PRODUCERS]


def batches_of(steps: Iterable[Step]) -> list[bytes]:
    """Returns the batches of a log with consecutive offsets. Every commit has a distinct committed offset."""
    batches: list[bytes] = []
    end = 0
    for number, step in enumerate(steps):
        batch = _batch(step, number, end)
        batches.append(batch)
        end = decode_header(batch).next_offset
    return batches


def stable_offset(batches: Iterable[bytes]) -> int:
    """Returns the first offset of the open transactions, or the log end offset if none is open."""
    begun: dict[int, int] = {}
    end = 0
    for header in map(decode_header, batches):
        end = header.next_offset
        if header.is_control:
            begun.pop(header.producer_id, None)
        elif header.is_transactional:
            begun.setdefault(header.producer_id, header.base_offset)
    return min(begun.values(), default=end)


def _batch(step: Step, number: int, base_offset: int) -> bytes:
    at_ms = NOW_MS + number
    if step.what in ("commit", "abort"):
        kind = ControlRecordType.COMMIT if step.what == "commit" else ControlRecordType.ABORT
        return encode_control_batch(
            kind, end_txn_marker(0), timestamp_ms=at_ms, producer_id=step.producer_id, base_offset=base_offset
        )
    records = _records(step, number, at_ms)
    if step.is_old:
        for record in records:
            record.key = b"\0\0" + (record.key or b"")[2:]
    if step.producer_id == NO_PRODUCER:
        return encode_batch(records, base_offset=base_offset)
    return encode_batch(
        records, base_offset=base_offset, producer_id=step.producer_id, producer_epoch=0, is_transactional=True
    )


def _records(step: Step, number: int, at_ms: int) -> list[Record]:
    group = step.group
    partitions = [(step.partition + index) % PARTITIONS for index in range(step.width)]
    if step.what == "commit offsets":
        return [
            commit_record(group, TOPIC, partition, 100 * number + index, at_ms)
            for index, partition in enumerate(partitions)
        ]
    tombstones = [commit_tombstone(group, TOPIC, partition, at_ms) for partition in partitions]
    if step.what == "delete offsets":
        return tombstones
    if step.what == "delete group":
        # As DeleteGroups writes it, except that only some of the offsets may have a tombstone.
        return [*tombstones, record_of(new_classic_group_tombstone(group, TombstoneReason.GROUP_DELETE), at_ms)]
    made = {
        "classic group": group_metadata_record(group, GroupMetadataValue(protocol_type="consumer", generation=number)),
        "consumer group": new_group_epoch_record(group, number, 0, at_ms, None),
        "classic group tombstone": new_classic_group_tombstone(group, TombstoneReason.MIGRATION),
        "consumer group tombstone": new_group_epoch_tombstone(group, TombstoneReason.MIGRATION),
    }
    return [record_of(made[step.what], at_ms)]


def replayed(batches: Iterable[bytes]) -> GroupCoordinatorShard:
    """Returns the shard that a broker loads from these batches."""
    shard = GroupCoordinatorShard(BrokerConfig.from_properties({}), MetadataImage.empty())
    runtime = ShardSet(lambda _: shard, CoordinatorSerde())
    runtime.load(0, ((decode_header(batch), batch) for batch in batches), NOW_MS)
    return shard


def offsets_of(shard: GroupCoordinatorShard) -> dict[OffsetOf, int]:
    """Returns all committed offsets of a shard."""
    state = cast("dict[OffsetOf, CommittedOffset]", shard.hard_state()["offsets"])
    return {key: committed.offset for key, committed in state.items()}
