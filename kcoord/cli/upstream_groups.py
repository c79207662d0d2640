# SPDX-License-Identifier: Apache-2.0
"""`kcoord upstream import`, `export` and `verify`: the committed offsets of groups on both sides.

An import is the work of kcoord, which also knows the groups that were here before (`ImportGroups`). An export commits
in the upstream, as an administrator does. Both change only groups without members. Neither `export` nor `verify` names
a group to kcoord that it does not list, because that would import the group.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple

from kcoord.cli.output import OutputColumn, print_json, print_rows
from kcoord.cli.session import EXIT_FAILED, error_text
from kcoord.cli.upstream_sides import Sides, portions
from kcoord.client.admin.client import AdminClient
from kcoord.client.cluster import Purpose
from kcoord.client.results import outcome_of
from kcoord.client.types import OffsetAndMetadata, TopicPartition
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ImportGroupsRequest, ImportGroupsResponse

IMPORTED, NOTHING, PRESENT, DEPARTED = range(4)
"""The outcomes of ImportGroups."""
_OUTCOMES: Final = {
    NOTHING: "nothing to import",
    PRESENT: "is here already",
    DEPARTED: "was here before; --again imports it",
}
_INACTIVE: Final = ("Empty", "Dead")
_RESULT: Final = (
    OutputColumn("GROUP", "group"),
    OutputColumn("OFFSETS", "offsets"),
    OutputColumn("RESULT", "result"),
)
_DIFFERENCE: Final = (
    OutputColumn("GROUP", "group"),
    OutputColumn("TOPIC", "topic"),
    OutputColumn("PARTITION", "partition"),
    OutputColumn("UPSTREAM", "upstream"),
    OutputColumn("KCOORD", "kcoord"),
)
_SHOWN_PARTITIONS: Final = 3

Offsets = Mapping[TopicPartition, OffsetAndMetadata]


class Result(NamedTuple):
    """What became of one group."""

    group_id: str
    offsets: int
    text: str
    failed: bool = False


# --- import -----------------------------------------------------------------------------------------------------------


async def import_groups(sides: Sides, options: argparse.Namespace) -> int:
    group_ids = list(dict.fromkeys(options.group)) or await listed_groups(sides.upstream)
    results: list[Result] = []
    for portion in portions(group_ids):
        answers = await ask_for_import(sides, portion, again=options.again, dry_run=options.dry_run)
        results += answers.values()
    return _print_results(results, options)


async def ask_for_import(
    sides: Sides, group_ids: Sequence[str], *, again: bool = False, dry_run: bool = False
) -> dict[str, Result]:
    """Asks the instances one after the other, each for the groups that no other one coordinates."""
    outcomes: dict[str, ImportGroupsResponse.ImportResult | KafkaError] = {
        group_id: KafkaError(Errors.NOT_COORDINATOR) for group_id in group_ids
    }
    for node in sides.instances:
        request = ImportGroupsRequest(
            groups=[group_id for group_id, outcome in outcomes.items() if _is_of_another(outcome)],
            again=again,
            dry_run=dry_run,
        )
        if request.groups:
            connection = await sides.cluster.connection(node.node_id, Purpose.COORDINATOR)
            response = await connection.call(request, ImportGroupsResponse)
            for result in response.results:
                outcomes[result.group_id] = outcome_of(result.error_code, result.error_message, result)
    return {group_id: _imported(group_id, outcome, dry_run=dry_run) for group_id, outcome in outcomes.items()}


def _is_of_another(outcome: ImportGroupsResponse.ImportResult | KafkaError) -> bool:
    return isinstance(outcome, KafkaError) and outcome.error is Errors.NOT_COORDINATOR


def _imported(group_id: str, outcome: ImportGroupsResponse.ImportResult | KafkaError, *, dry_run: bool) -> Result:
    if isinstance(outcome, KafkaError):
        return Result(group_id, 0, error_text(outcome), failed=True)
    if outcome.outcome == IMPORTED:
        return Result(group_id, outcome.offsets, "would be imported" if dry_run else "imported")
    return Result(group_id, outcome.offsets, _OUTCOMES[outcome.outcome])


# --- export -----------------------------------------------------------------------------------------------------------


async def export_groups(sides: Sides, options: argparse.Namespace) -> int:
    here = await listed_groups(sides.kcoord)
    group_ids = list(dict.fromkeys(options.group)) or here
    results = [Result(name, 0, "kcoord does not have the group", failed=True) for name in group_ids if name not in here]
    for portion in portions(name for name in group_ids if name in here):
        offsets = await committed(sides.kcoord, portion)
        theirs = await committed(sides.upstream, portion)
        reasons = await _obstacles(sides.kcoord, portion, "here") | await _obstacles(
            sides.upstream, portion, "in the upstream"
        )
        for group_id in portion:
            own, earlier = offsets[group_id], theirs[group_id]
            if group_id in reasons or isinstance(own, KafkaError) or isinstance(earlier, KafkaError):
                error = own if isinstance(own, KafkaError) else earlier
                reason = reasons.get(group_id) or (error_text(error) if isinstance(error, KafkaError) else "")
                results.append(Result(group_id, 0, reason, failed=True))
            else:
                results.append(await _export(sides.upstream, group_id, own, earlier, options))
    return _print_results(results, options)


async def _obstacles(admin: AdminClient, group_ids: Sequence[str], where: str) -> dict[str, str]:
    """Returns why groups cannot be exported: they have members on this side, or nobody knows."""
    results = await admin.describe_consumer_groups(group_ids)
    reasons = {}
    for group_id in group_ids:
        error = results.error(group_id)
        if error is None:
            state = results[group_id].state
            if state not in _INACTIVE:
                reasons[group_id] = f"has {len(results[group_id].members)} members {where} ({state}); stop them first"
        elif error.error is not Errors.GROUP_ID_NOT_FOUND:
            reasons[group_id] = f"{where}: {error_text(error)}"
    return reasons


async def _export(
    upstream: AdminClient, group_id: str, offsets: Offsets, theirs: Offsets, options: argparse.Namespace
) -> Result:
    if not offsets:
        return Result(group_id, 0, "no committed offsets")
    later = [
        f"{partition}: {theirs[partition].offset} > {offset.offset}"
        for partition, offset in sorted(offsets.items())
        if partition in theirs and theirs[partition].offset > offset.offset
    ]
    if later and not options.overwrite:
        shown = ", ".join(later[:_SHOWN_PARTITIONS]) + (", ..." if len(later) > _SHOWN_PARTITIONS else "")
        return Result(
            group_id,
            0,
            f"offsets in the upstream are later ({shown}); --overwrite exports it all the same",
            failed=True,
        )
    if options.dry_run:
        return Result(group_id, len(offsets), "would be exported")
    errors = (await upstream.alter_consumer_group_offsets(group_id, offsets)).errors
    if errors:
        partition, error = next(iter(sorted(errors.items())))
        text = f"{len(errors)} of {len(offsets)} offsets failed; {partition}: {error_text(error)}"
        return Result(group_id, len(offsets) - len(errors), text, failed=True)
    return Result(group_id, len(offsets), "exported")


# --- verify -----------------------------------------------------------------------------------------------------------


async def verify_groups(sides: Sides, options: argparse.Namespace) -> int:
    here = await listed_groups(sides.kcoord)
    group_ids = list(dict.fromkeys(options.group)) or sorted({*here, *await listed_groups(sides.upstream)})
    rows: list[dict[str, object]] = []
    equal = 0
    for portion in portions(group_ids):
        theirs = (await committed(sides.upstream, portion)).items()
        ours = await committed(sides.kcoord, [group_id for group_id in portion if group_id in here])
        for group_id, offsets in theirs:
            own = ours.get(group_id, {})
            for side in (offsets, own):
                if isinstance(side, KafkaError):
                    raise KafkaError(side.error, f"group {group_id}: {error_text(side)}")
            assert not isinstance(offsets, KafkaError)
            assert not isinstance(own, KafkaError)
            differences = list(_differences(group_id, offsets, own))
            rows += differences
            equal += bool(not differences and offsets)
    if options.json:
        print_json({"equal": equal, "differences": rows})
    else:
        if rows:
            print_rows(_DIFFERENCE, rows, as_json=False)
        print(f"groups with equal offsets: {equal}; offsets that differ: {len(rows)}")
    return EXIT_FAILED if rows else 0


def _differences(group_id: str, upstream: Offsets, kcoord: Offsets) -> Iterable[dict[str, object]]:
    for partition in sorted({*upstream, *kcoord}):
        theirs, own = upstream.get(partition), kcoord.get(partition)
        if theirs != own:
            yield {
                "group": group_id,
                "topic": partition.topic,
                "partition": partition.partition,
                "upstream": _text(theirs, own),
                "kcoord": _text(own, theirs),
            }


def _text(offset: OffsetAndMetadata | None, other: OffsetAndMetadata | None) -> str | None:
    """Returns the offset, with leader epoch and metadata if only these differ from the other side."""
    if offset is None:
        return None
    if other is None or other.offset != offset.offset:
        return str(offset.offset)
    return f"{offset.offset} (leader epoch {offset.leader_epoch}, metadata {offset.metadata!r})"


# --- both -------------------------------------------------------------------------------------------------------------


async def listed_groups(admin: AdminClient) -> list[str]:
    """Returns the ids of the consumer groups of one side."""
    return [group.group_id for group in await admin.list_consumer_groups()]


async def committed(
    admin: AdminClient, group_ids: Sequence[str]
) -> dict[str, dict[TopicPartition, OffsetAndMetadata] | KafkaError]:
    """Returns the committed offsets of groups, none for a group that does not exist. Waits for open transactions."""
    results = await admin.list_consumer_group_offsets(group_ids, require_stable=True)
    offsets: dict[str, dict[TopicPartition, OffsetAndMetadata] | KafkaError] = {}
    for group_id in group_ids:
        error = results.error(group_id)
        if error is None:
            pairs = results[group_id].items()
            offsets[group_id] = {partition: offset for partition, offset in pairs if offset is not None}
        else:
            offsets[group_id] = {} if error.error is Errors.GROUP_ID_NOT_FOUND else error
    return offsets


def _print_results(results: Sequence[Result], options: argparse.Namespace) -> int:
    rows = [
        {"group": result.group_id, "offsets": result.offsets, "result": result.text}
        for result in sorted(results, key=lambda result: result.group_id)
    ]
    if rows or options.json:
        print_rows(_RESULT, rows, as_json=options.json)
    return EXIT_FAILED if any(result.failed for result in results) else 0
