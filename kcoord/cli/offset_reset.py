# SPDX-License-Identifier: Apache-2.0
"""Computes the new offsets of `--reset-offsets`, and parses its arguments. Pure: callers fetch the facts."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from enum import Enum
from typing import NamedTuple

from kcoord.cli.options import MOST_INT, MOST_LONG
from kcoord.client.reset_policy import parse_duration_ms
from kcoord.client.types import TopicPartition


class Target(Enum):
    """The target of a reset."""

    EARLIEST = "earliest"
    LATEST = "latest"
    CURRENT = "current"
    OFFSET = "offset"
    SHIFT = "shift"
    TIME = "time"


class Reset(NamedTuple):
    """A target. `value` is its offset, distance or time in ms, for the targets that have one."""

    target: Target
    value: int = 0


class Facts(NamedTuple):
    """The offsets of a partition. None means no committed offset, or no record at or after the time."""

    earliest: int
    latest: int
    committed: int | None = None
    at_time: int | None = None


class Decision(NamedTuple):
    """The new offset, or None if there is none, with a note for the user."""

    offset: int | None
    note: str | None = None


def decide(reset: Reset, facts: Facts) -> Decision:
    """Returns the new offset of a partition. It lies between log start offset and log end offset."""
    match reset.target:
        case Target.EARLIEST:
            return Decision(facts.earliest)
        case Target.LATEST:
            return Decision(facts.latest)
        case Target.CURRENT:
            return _current(facts)
        case Target.OFFSET:
            return _within(reset.value, facts)
        case Target.SHIFT:
            if facts.committed is None:
                return Decision(None, "has no committed offset to shift")
            return _within(facts.committed + reset.value, facts)
        case Target.TIME:
            if facts.at_time is None:
                return Decision(facts.latest, "has no record since then: set to its end")
            return Decision(facts.at_time)


def _current(facts: Facts) -> Decision:
    if facts.committed is None:
        return Decision(facts.latest, "has no committed offset: set to its end")
    return Decision(facts.committed)


def _within(offset: int, facts: Facts) -> Decision:
    if offset < facts.earliest:
        return Decision(facts.earliest, f"begins at {facts.earliest}: {offset} is before that")
    if offset > facts.latest:
        return Decision(facts.latest, f"ends at {facts.latest}: {offset} is after that")
    return Decision(offset)


def parse_topics(texts: Iterable[str]) -> dict[str, list[int] | None]:
    """Parses topics: `t:0,1` names partitions, `t` names all partitions (None). Raises ValueError if malformed."""
    topics: dict[str, list[int] | None] = {}
    for text in texts:
        topic, colon, numbers = text.partition(":")
        if not topic:
            raise ValueError(f"{text!r} is not TOPIC or TOPIC:PARTITION,...")
        if not colon:
            topics[topic] = None
            continue
        partitions = [_partition(number, text) for number in numbers.split(",")]
        earlier = topics.setdefault(topic, [])
        if earlier is not None:
            topics[topic] = sorted({*earlier, *partitions})
    return topics


def _partition(text: str, whole: str) -> int:
    if not text.strip().isdecimal() or int(text) > MOST_INT:
        raise ValueError(f"{whole!r}: {text!r} is not a partition")
    return int(text)


def parse_datetime_ms(text: str) -> int:
    """Parses an ISO 8601 time, by default in UTC, and returns milliseconds since the epoch."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a time such as 2026-01-31T12:00:00.000") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(round(moment.timestamp() * 1000), 0)


def parse_age_ms(text: str) -> int:
    """Parses an ISO 8601 duration such as P1D or PT30M, and returns milliseconds."""
    duration_ms = parse_duration_ms(text)
    if duration_ms is None or duration_ms < 0:
        raise ValueError(f"{text!r} is not a duration such as P1D or PT1H30M")
    return duration_ms


Plan = dict[str, dict[TopicPartition, int]]


def parse_plan(text: str, group_ids: list[str]) -> Plan:
    """Parses the CSV of --export: `group,topic,partition,offset`. A single group may be left out."""
    plan: Plan = {}
    for number, fields in enumerate(csv.reader(io.StringIO(text)), 1):
        if not fields:
            continue
        group_id, partition, offset = _plan_line(number, fields, group_ids)
        plan.setdefault(group_id, {})[partition] = offset
    return plan


def _plan_line(number: int, fields: list[str], group_ids: list[str]) -> tuple[str, TopicPartition, int]:
    if len(fields) == 3 and len(group_ids) == 1:
        fields = [group_ids[0], *fields]
    if len(fields) != 4:
        columns = "topic,partition,offset" if len(group_ids) == 1 else "group,topic,partition,offset"
        raise ValueError(f"line {number}: the columns must be {columns}")
    group_id, topic, partition, offset = (field.strip() for field in fields)
    if group_id not in group_ids:
        raise ValueError(f"line {number}: {group_id} is not one of the groups to reset")
    if not topic or not partition.isdecimal() or not offset.isdecimal():
        raise ValueError(f"line {number}: not a topic with a partition and an offset: {','.join(fields)}")
    if int(partition) > MOST_INT or int(offset) > MOST_LONG:
        raise ValueError(f"line {number}: the greatest partition is {MOST_INT}, the greatest offset {MOST_LONG}")
    return group_id, TopicPartition(topic, int(partition)), int(offset)


def format_plan(plan: Mapping[str, Mapping[TopicPartition, int]]) -> str:
    """Returns the CSV for --from-file."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for group_id, offsets in plan.items():
        prefix = [group_id] if len(plan) > 1 else []
        for partition in sorted(offsets):
            writer.writerow([*prefix, partition.topic, partition.partition, offsets[partition]])
    return out.getvalue()
