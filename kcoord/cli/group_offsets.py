# SPDX-License-Identifier: Apache-2.0
"""`kcoord consumer-groups --delete`, `--delete-offsets` and `--reset-offsets`: the actions that change groups.

A reset is planned for all groups before the first commit: it skips groups with members, and partitions without a new
offset. Then each group gets one request. Groups and partitions succeed or fail independently, and any failure makes
the exit code 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from kcoord.cli.offset_deletion import refusals_of
from kcoord.cli.offset_reset import (
    Facts,
    Plan,
    Reset,
    Target,
    decide,
    format_plan,
    parse_age_ms,
    parse_datetime_ms,
    parse_plan,
    parse_topics,
)
from kcoord.cli.output import OutputColumn, print_json, print_rows
from kcoord.cli.session import EXIT_FAILED, CommandError, error_json, error_text, report_failure, warn
from kcoord.cli.table import current_time_ms
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.model import OffsetSpec
from kcoord.client.types import OffsetAndMetadata, TopicPartition
from kcoord_protocol.errors import Errors, KafkaError

_INACTIVE_STATES = ("Empty", "Dead")
_PARTITION = (OutputColumn("TOPIC", "topic"), OutputColumn("PARTITION", "partition"))
_STATUS = (*_PARTITION, OutputColumn("STATUS", "status"))
_RESET = (OutputColumn("GROUP", "group"), *_PARTITION, OutputColumn("NEW-OFFSET", "new_offset"))
_RESET_VERBOSE = (*_RESET[:-1], OutputColumn("CURRENT-OFFSET", "current_offset"), _RESET[-1])

TopicOrPartition = tuple[str, int | None]


# --- delete -----------------------------------------------------------------------------------------------------------


async def delete_groups(admin: AdminClient, options: argparse.Namespace) -> int:
    group_ids = list(dict.fromkeys(options.group)) or [group.group_id for group in await admin.list_consumer_groups()]
    results = await admin.delete_consumer_groups(group_ids)
    if options.json:
        print_json([{"group": group_id, **error_json(results.error(group_id))} for group_id in group_ids])
    elif results.values:
        names = ", ".join(f"'{group_id}'" for group_id in group_ids if group_id in results.values)
        print(f"Deletion of requested consumer groups ({names}) was successful.")
    for group_id, error in results.errors.items():
        report_failure(f"Group '{group_id}' could not be deleted due to: {error_text(error)}")
    return EXIT_FAILED if results.errors else 0


# --- delete offsets ---------------------------------------------------------------------------------------------------


async def delete_offsets(admin: AdminClient, options: argparse.Namespace) -> int:
    """Deletes offsets (KIP-496), and prints a row per partition, or per topic that does not exist."""
    group_id = options.group[0]
    outcomes: dict[TopicOrPartition, KafkaError | None] = {}
    partitions = await _partitions_of(admin, parse_topics(options.topic), outcomes)
    committed: Mapping[TopicPartition, OffsetAndMetadata | None] = {}
    if options.dry_run and partitions:
        refusals = await refusals_of(admin, group_id, partitions, options.timeout)
        outcomes |= {(partition.topic, partition.partition): refusals[partition] for partition in partitions}
        if not all(refusals.values()):
            committed = (await admin.list_consumer_group_offsets({group_id: partitions}))[group_id]
    elif partitions:
        results = (await admin.delete_consumer_group_offsets(group_id, partitions)).results
        outcomes |= {(partition.topic, partition.partition): results.error(partition) for partition in partitions}
    _print_deleted(group_id, outcomes, committed, options)
    return EXIT_FAILED if any(outcomes.values()) else 0


async def _partitions_of(
    admin: AdminClient, topics: Mapping[str, list[int] | None], failed: dict[TopicOrPartition, KafkaError | None]
) -> list[TopicPartition]:
    """Returns the named partitions, and all partitions of topics that were named without partitions.

    Adds topics that do not exist to `failed`.
    """
    whole = [topic for topic, partitions in topics.items() if partitions is None]
    described = await admin.describe_topics(whole)
    partitions = [TopicPartition(topic, index) for topic, indexes in topics.items() for index in indexes or ()]
    for topic in whole:
        error = described.error(topic)
        if error is None:
            partitions += (TopicPartition(topic, partition.partition) for partition in described[topic].partitions)
        else:
            failed[topic, None] = error
    return sorted(partitions)


def _print_deleted(
    group_id: str,
    outcomes: Mapping[TopicOrPartition, KafkaError | None],
    committed: Mapping[TopicPartition, OffsetAndMetadata | None],
    options: argparse.Namespace,
) -> None:
    """Prints the outcome of each partition. In a dry run it is the expected one, and `committed` has the offsets."""
    in_order = sorted(outcomes, key=lambda key: (key[0], -1 if key[1] is None else key[1]))
    offsets: dict[TopicOrPartition, OffsetAndMetadata | None] = {
        partition: offset for partition, offset in committed.items() if outcomes[partition] is None
    }
    if options.json:
        rows = [{"topic": key[0], "partition": key[1], **error_json(outcomes[key])} for key in in_order]
        if options.dry_run:
            rows = [
                {**row, "would_delete_offset": None if (offset := offsets.get(key)) is None else offset.offset}
                for key, row in zip(in_order, rows, strict=True)
            ]
        print_json(rows)
        return
    errors = [error for error in outcomes.values() if error is not None]
    of_group = next((error for error in errors if error.error in _GROUP_ERRORS), None)
    if of_group is not None:
        print(f"Error: {of_group.message or of_group.error.description}")
    elif errors:
        print("Error: Encountered some partition-level error, see the follow-up details.")
    else:
        verb = "would succeed" if options.dry_run else "succeeded"
        print(f"Request {verb} for deleting offsets from group {group_id}.")
    print()
    statuses = {
        key: _foreseen(offsets.get(key)) if error is None and options.dry_run else _status(error)
        for key, error in outcomes.items()
    }
    print_rows(
        _STATUS,
        [{"topic": key[0], "partition": key[1], "status": statuses[key]} for key in in_order],
        as_json=False,
    )


def _foreseen(offset: OffsetAndMetadata | None) -> str:
    """Returns the status of a partition in a dry run. The real run prints `Successful` in both cases."""
    return "No committed offset" if offset is None else f"Would delete offset {offset.offset}"


_GROUP_ERRORS = (
    Errors.GROUP_ID_NOT_FOUND,
    Errors.INVALID_GROUP_ID,
    Errors.NON_EMPTY_GROUP,
    Errors.GROUP_AUTHORIZATION_FAILED,
)


def _status(error: KafkaError | None) -> str:
    return "Successful" if error is None else f"Error: {error_text(error)}"


# --- reset ------------------------------------------------------------------------------------------------------------


class PlannedOffset(NamedTuple):
    """A line of the plan: the new offset of a partition."""

    group_id: str
    partition: TopicPartition
    current: int | None
    new: int


async def reset_offsets(admin: AdminClient, options: argparse.Namespace) -> int:
    group_ids = list(dict.fromkeys(options.group)) or [group.group_id for group in await admin.list_consumer_groups()]
    from_file = _plan_from_file(options, group_ids)
    inactive = await _inactive(admin, group_ids)
    is_failed = len(inactive) < len(group_ids)
    planned: list[PlannedOffset] = []
    for group_id in inactive:
        reset = None if from_file is not None else await _reset_of(admin, options, group_id)
        if reset is None and from_file is None:
            report_failure(
                f"offsets of '{group_id}' cannot be set to its start time: its creation time is unknown to the broker"
            )
            is_failed = True
            continue
        resets = await _resets_of(admin, options, group_id, reset, from_file)
        lines = await _plan(admin, group_id, resets)
        planned += lines
        is_failed = is_failed or len(lines) < len(resets) or not (resets or options.all_groups)
    if options.execute:
        planned, are_all_done = await _commit(admin, planned)
        is_failed = is_failed or not are_all_done
    elif not options.dry_run and not options.export:
        warn("nothing was changed: this is a dry run without --execute")
    _print_plan(planned, options)
    return EXIT_FAILED if is_failed else 0


def _plan_from_file(options: argparse.Namespace, group_ids: list[str]) -> Plan | None:
    if options.from_file is None:
        return None
    try:
        return parse_plan(options.from_file.read_text(encoding="utf-8"), group_ids)
    except ValueError as error:
        raise CommandError(f"{options.from_file}: {error}") from error


async def _inactive(admin: AdminClient, group_ids: list[str]) -> list[str]:
    """Returns the groups without members, including groups that do not exist."""
    described = await admin.describe_consumer_groups(group_ids)
    inactive = []
    for group_id in group_ids:
        error = described.error(group_id)
        if error is not None and error.error is not Errors.GROUP_ID_NOT_FOUND:
            raise error
        state = "Dead" if error is not None else described[group_id].state
        if state in _INACTIVE_STATES:
            inactive.append(group_id)
        else:
            report_failure(f"offsets of '{group_id}' can only be reset if it is inactive, but its state is {state}")
    return inactive


async def _reset_of(admin: AdminClient, options: argparse.Namespace, group_id: str) -> Reset | None:
    """Returns the requested reset; None for --to-start-time if the group has none, such as a classic group."""
    if not options.to_start_time:
        return reset_of(options, current_time_ms())
    group = (await admin.describe_consumer_groups([group_id])).values.get(group_id)
    if group is None or group.group_creation_time_ms is None:
        return None
    return Reset(Target.TIME, group.group_creation_time_ms)


async def _resets_of(
    admin: AdminClient, options: argparse.Namespace, group_id: str, reset: Reset | None, from_file: Plan | None
) -> dict[TopicPartition, Reset]:
    if from_file is not None:
        return {partition: Reset(Target.OFFSET, offset) for partition, offset in from_file.get(group_id, {}).items()}
    assert reset is not None, "without a file the options have a target"
    if options.all_topics:
        committed = (await admin.list_consumer_group_offsets([group_id]))[group_id]
        return dict.fromkeys((partition for partition, offset in committed.items() if offset is not None), reset)
    failed: dict[TopicOrPartition, KafkaError | None] = {}
    partitions = await _partitions_of(admin, parse_topics(options.topic), failed)
    for (topic, _), error in failed.items():
        if error is not None:
            raise CommandError(f"{topic}: {error_text(error)}")
    return dict.fromkeys(partitions, reset)


def reset_of(options: argparse.Namespace, now_ms: int) -> Reset:
    """Returns the requested reset of options that were checked before."""
    if options.to_offset is not None:
        return Reset(Target.OFFSET, options.to_offset)
    if options.shift_by is not None:
        return Reset(Target.SHIFT, options.shift_by)
    if options.to_datetime is not None:
        return Reset(Target.TIME, parse_datetime_ms(options.to_datetime))
    if options.by_duration is not None:
        return Reset(Target.TIME, max(now_ms - parse_age_ms(options.by_duration), 0))
    if options.to_earliest:
        return Reset(Target.EARLIEST)
    return Reset(Target.LATEST if options.to_latest else Target.CURRENT)


async def _plan(admin: AdminClient, group_id: str, resets: Mapping[TopicPartition, Reset]) -> list[PlannedOffset]:
    if not resets:
        warn(f"the group '{group_id}' has no offsets to reset")
        return []
    facts = await _facts(admin, group_id, resets)
    planned = []
    for partition in sorted(resets):
        decision = decide(resets[partition], facts[partition])
        if decision.note is not None:
            warn(f"{group_id}: {partition} {decision.note}")
        if decision.offset is not None:
            planned.append(PlannedOffset(group_id, partition, facts[partition].committed, decision.offset))
    return planned


async def _facts(
    admin: AdminClient, group_id: str, resets: Mapping[TopicPartition, Reset]
) -> dict[TopicPartition, Facts]:
    """Returns start, end and committed offset of the partitions. Raises CommandError if one does not exist."""
    earliest = await _offsets(admin, dict.fromkeys(resets, OffsetSpec.earliest()))
    latest = await _offsets(admin, dict.fromkeys(resets, OffsetSpec.latest()))
    times = {
        partition: OffsetSpec.for_timestamp(reset.value)
        for partition, reset in resets.items()
        if reset.target is Target.TIME
    }
    at_time = await _offsets(admin, times) if times else {}
    committed = (await admin.list_consumer_group_offsets({group_id: list(resets)}))[group_id]
    facts = {}
    for partition in resets:
        offset = committed.get(partition)
        since = at_time.get(partition, -1)
        facts[partition] = Facts(
            earliest[partition],
            latest[partition],
            None if offset is None else offset.offset,
            since if since >= 0 else None,
        )
    return facts


async def _offsets(admin: AdminClient, specs: Mapping[TopicPartition, OffsetSpec]) -> dict[TopicPartition, int]:
    results = await admin.list_offsets(specs)
    for partition, error in results.errors.items():
        raise CommandError(f"{partition}: {error.error.name}: {error.error.description}")
    return {partition: listed.offset for partition, listed in results.values.items()}


async def _commit(admin: AdminClient, planned: Iterable[PlannedOffset]) -> tuple[list[PlannedOffset], bool]:
    """Commits the plan. Returns the committed lines, and whether these are all lines."""
    by_group: dict[str, list[PlannedOffset]] = {}
    for line in planned:
        by_group.setdefault(line.group_id, []).append(line)
    done: list[PlannedOffset] = []
    are_all_done = True
    for group_id, lines in by_group.items():
        results = await admin.alter_consumer_group_offsets(group_id, {line.partition: line.new for line in lines})
        done += (line for line in lines if results.error(line.partition) is None)
        for partition, error in results.errors.items():
            are_all_done = False
            reason = "the group has members now" if error.error is Errors.UNKNOWN_MEMBER_ID else error_text(error)
            report_failure(f"{group_id}: {partition} was not reset: {reason}")
    return done, are_all_done


def _print_plan(planned: Iterable[PlannedOffset], options: argparse.Namespace) -> None:
    if options.export:
        plan: Plan = {group_id: {} for group_id in options.group}
        for line in planned:
            plan.setdefault(line.group_id, {})[line.partition] = line.new
        print(format_plan(plan), end="")
        return
    rows = [
        {
            "group": line.group_id,
            "topic": line.partition.topic,
            "partition": line.partition.partition,
            "current_offset": line.current,
            "new_offset": line.new,
        }
        for line in planned
    ]
    columns = _RESET_VERBOSE if options.verbose or options.json else _RESET
    if rows or options.json:
        print_rows(columns, rows, as_json=options.json)
