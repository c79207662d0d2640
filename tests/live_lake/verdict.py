# SPDX-License-Identifier: Apache-2.0
"""Compares a lake with the ledger of the clients, and with the log as librdkafka reads it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer, TopicPartition
from deltalake import DeltaTable

from tests.live_lake.clients import Commit, Ledger

OFFSETS_TOPIC: Final = "__consumer_offsets"
_READ_SECONDS: Final = 10.0

Place = tuple[int, int]
"""Log partition and log offset."""


class Bytes(NamedTuple):
    key: bytes | None
    value: bytes | None


def log_records(address: str) -> dict[Place, Bytes]:
    """Reads all records but control records."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": "verdict",
            "enable.auto.commit": False,
            "isolation.level": "read_uncommitted",
            "enable.partition.eof": True,
        }
    )
    partitions = consumer.list_topics(OFFSETS_TOPIC, timeout=30).topics[OFFSETS_TOPIC].partitions
    consumer.assign([TopicPartition(OFFSETS_TOPIC, partition, 0) for partition in partitions])
    records, left = dict[Place, Bytes](), set(partitions)
    while left:
        message = consumer.poll(_READ_SECONDS)
        assert message is not None, f"no records of the partitions {left}"
        place = message.partition(), message.offset()
        assert place[0] is not None and place[1] is not None
        if message.error() is not None:
            left.discard(place[0])
        else:
            records[place[0], place[1]] = Bytes(message.key(), message.value())
    consumer.close()
    return records


def judge(lake: Path, ledger: Ledger, log: dict[Place, Bytes], newer: dict[Place, Bytes]) -> Iterator[str]:
    """Yields what is wrong with the lake, and prints what was compared.

    `log` was read before the last copy, and `newer` after it. The log still grows then, because brokers remove members
    whose sessions expire.
    """
    rows = _rows(lake / "bronze" / "records", "log_partition", "log_offset", "key", "value", "kind")
    places = Counter((partition, offset) for partition, offset, *_ in rows)
    twice = [place for place, times in places.items() if times > 1]
    copied = {
        (partition, offset): Bytes(key, value) for partition, offset, key, value, kind in rows if kind != "control"
    }
    missing = log.keys() - copied.keys()
    other = [place for place in copied if newer.get(place) != copied[place]]
    controls = len(places) - len(copied)
    print(f"records: {len(log):,} in the log, {len(copied):,} in the lake with {controls:,} control records")
    print(f"records: {len(missing)} missing, {len(twice)} twice, {len(other)} that the log does not have so")
    yield from _if(missing, "records are missing")
    yield from _if(twice, "records are in the lake twice")
    yield from _if(other, "records of the lake are not those of the log")
    yield from _judge_commits(lake, ledger)


def _judge_commits(lake: Path, ledger: Ledger) -> Iterator[str]:
    names = ("group", "partition", "committed_offset", "is_tombstone", "log_partition", "log_offset")
    rows = _rows(lake / "silver" / "commits", *names)
    places = Counter(row[-2:] for row in rows)
    counted = Counter(Commit(*row[:3]) for row in rows)
    tombstones = Counter(group for group, _, _, is_tombstone, *_ in rows if is_tombstone)
    twice = [place for place, times in places.items() if times > 1]
    missing = [commit for commit in ledger.committed if not counted[commit]]
    aborted = [commit for commit in ledger.aborted if counted[commit]]
    print(
        f"commits: {len(ledger.committed):,} acknowledged, {len(ledger.aborted):,} aborted, "
        f"{sum(ledger.deleted.values()):,} deletions, {ledger.joins:,} joins, "
        f"{ledger.failures:,} failed clients, {ledger.hanging} that hang"
    )
    print(f"commits: {len(missing)} missing, {len(twice)} twice, {len(aborted)} aborted ones in the lake")
    if ledger.hanging:
        yield f"{ledger.hanging} clients did not end"
    yield from _if(missing, "acknowledged commits are missing")
    yield from _if(twice, "commits are in the lake twice")
    yield from _if(aborted, "aborted commits are in the lake")
    for group, deletions in ledger.deleted.items():
        if tombstones[group] < deletions:
            yield f"{group}: {deletions} acknowledged deletions, but {tombstones[group]} tombstones in the lake"


def _rows(table: Path, *names: str) -> list[tuple[Any, ...]]:
    """Returns the values of some columns of a table, a tuple for each row."""
    columns = DeltaTable(table).to_pyarrow_dataset().to_table(columns=list(names)).to_pydict()
    return [*zip(*(columns[name] for name in names), strict=True)]


def _if(wrong: Collection[tuple[object, ...]], what: str) -> Iterator[str]:
    if wrong:
        yield f"{len(wrong)} {what}, such as {sorted(wrong, key=str)[:3]}"
