# SPDX-License-Identifier: Apache-2.0
"""Logs made by hand: rows of the data source, with times in seconds after a fixed moment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime, timedelta
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from kcoord.pipeline.group_values import to_json
from kcoord.pipeline.schemas import RECORDS

BEGIN: Final = datetime(2026, 3, 1, 12, 0, tzinfo=UTC)
ORDERS: Final = "orders-id"


def moment(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


def partitions(numbers: Iterable[int], topic_id: str = ORDERS) -> list[dict[str, object]]:
    return [{"topic": None, "topic_id": topic_id, "partition": number, "epoch": None} for number in numbers]


class MadeLog:
    """One log partition. Each method writes one record and returns its offset."""

    def __init__(self, log_partition: int = 0) -> None:
        self.log_partition = log_partition
        self.rows: list[dict[str, object]] = []

    def commit(
        self, group: str, partition: int, offset: int | None, at: float, *, topic: str = "orders", **more: object
    ) -> int:
        """Writes a committed offset, or its tombstone if `offset` is None."""
        return self._add(
            1,
            group,
            at,
            topic=topic,
            partition=partition,
            committed_offset=offset,
            commit_timestamp=None if offset is None else moment(at),
            is_tombstone=offset is None,
            **more,
        )

    def marker(self, producer_id: int, at: float, kind: str = "commit") -> int:
        state = "committed" if kind == "commit" else "aborted"
        return self._add(
            None, None, at, producer_id=producer_id, control_type=kind, transaction=state, effective_offset=None
        )

    def epoch(self, group: str, epoch: int, at: float, **value: object) -> int:
        return self._add(3, group, at, value_json=to_json({"epoch": epoch, **value}))

    def target(self, group: str, epoch: int, at: float) -> int:
        return self._add(
            6, group, at, value_json=to_json({"assignment_epoch": epoch, "assignment_timestamp": moment(at)})
        )

    def member(self, group: str, member_id: str, at: float, topics: Iterable[str] = ("orders",), **more: object) -> int:
        value = {"client_id": "c", "client_host": "/127.0.0.1", "subscribed_topics": list(topics), **more}
        return self._add(5, group, at, member_id=member_id, value_json=to_json(value))

    def member_gone(self, group: str, member_id: str, at: float) -> int:
        self._add(8, group, at, member_id=member_id, is_tombstone=True)
        self._add(7, group, at, member_id=member_id, is_tombstone=True)
        return self._add(5, group, at, member_id=member_id, is_tombstone=True)

    def wanted(self, group: str, member_id: str, numbers: Iterable[int], at: float) -> int:
        return self._add(7, group, at, member_id=member_id, value_json=to_json(partitions(numbers)))

    def owned(
        self,
        group: str,
        member_id: str,
        epoch: int,
        numbers: Iterable[int],
        at: float,
        *,
        state: str = "stable",
        revoking: Iterable[int] = (),
    ) -> int:
        value = {
            "member_epoch": epoch,
            "previous_member_epoch": epoch - 1,
            "state": state,
            "assigned": partitions(numbers),
            "pending_revocation": partitions(revoking),
        }
        return self._add(8, group, at, member_id=member_id, value_json=to_json(value))

    def regex(self, group: str, regex: str, topics: Iterable[str], at: float) -> int:
        value = {"regex": regex, "topics": list(topics), "metadata_version": 1, "resolved_timestamp": moment(at)}
        return self._add(16, group, at, value_json=to_json(value))

    def regex_gone(self, group: str, at: float) -> int:
        """Writes the tombstone of the only regular expression of a group."""
        return self._add(16, group, at, is_tombstone=True)

    def generation(
        self,
        group: str,
        generation: int,
        members: Mapping[str, Iterable[int]],
        at: float,
        *,
        topics: Iterable[str] | None = ("orders",),
        protocol_type: str = "consumer",
    ) -> int:
        value = {
            "protocol_type": protocol_type,
            "generation": generation,
            "protocol": "range" if members else None,
            "leader": min(members, default=None),
            "state_timestamp": moment(at),
            "members": [
                {
                    "member_id": member_id,
                    "client_id": "c",
                    "client_host": "/127.0.0.1",
                    "subscribed_topics": None if topics is None else list(topics),
                    "assigned": [
                        {"topic": "orders", "topic_id": None, "partition": number, "epoch": None} for number in numbers
                    ],
                }
                for member_id, numbers in members.items()
            ],
        }
        return self._add(2, group, at, value_json=to_json(value))

    def streams_group(self, group: str, at: float) -> int:
        return self._add(17, group, at)

    def group_end(self, group: str, at: float, record_type: int = 3, *, group_end: bool = True) -> int:
        return self._add(record_type, group, at, is_tombstone=True, group_end=group_end)

    def _add(self, record_type: int | None, group: str | None, at: float, **fields: object) -> int:
        offset = len(self.rows)
        row: dict[str, object] = {
            "log_partition": self.log_partition,
            "log_offset": offset,
            "timestamp": moment(at),
            "effective_offset": offset,
            "record_type": record_type,
            "is_tombstone": False,
            "group": group,
            **fields,
        }
        key = [record_type, group, *(row.get(name) for name in ("member_id", "topic", "partition"))]
        row["key"] = repr(key).encode()
        self.rows.append(row)
        return offset


def source_frame(spark: SparkSession, *logs: MadeLog) -> DataFrame:
    """Makes the frame that `spark.read.format("kcoord").option("table", "records")` would give."""
    rows = [row for log in logs for row in log.rows]
    return spark.createDataFrame(pa.Table.from_pylist(rows, schema=RECORDS.schema()))
