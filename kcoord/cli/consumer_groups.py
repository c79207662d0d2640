# SPDX-License-Identifier: Apache-2.0
"""`kcoord consumer-groups`: list, describe, delete and reset consumer groups.

Options and columns are those of kafka-consumer-groups.sh. Unlike there, an action that fails in part exits with code 1,
and its errors go to stderr.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from kcoord.cli.group_filters import states_of, types_of
from kcoord.cli.options import option_name, parse_options

ACTIONS = ("list", "describe", "delete", "delete_offsets", "reset_offsets", "validate_regex")
TARGETS = (
    "to_earliest",
    "to_latest",
    "to_current",
    "to_offset",
    "shift_by",
    "to_datetime",
    "by_duration",
    "to_start_time",
    "from_file",
)

# Option -> the actions that accept it, as attribute names.
_USES = {
    "state": ("list", "describe"),
    "type": ("list", "describe"),
    "offsets": ("describe",),
    "members": ("describe",),
    "verbose": ("describe", "reset_offsets"),
    "group": ("describe", "delete", "delete_offsets", "reset_offsets"),
    "all_groups": ("describe", "delete", "reset_offsets"),
    "topic": ("delete_offsets", "reset_offsets"),
    "all_topics": ("reset_offsets",),
    "dry_run": ("reset_offsets", "delete_offsets"),
    "execute": ("reset_offsets",),
    "export": ("reset_offsets",),
    **dict.fromkeys(TARGETS, ("reset_offsets",)),
}


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parse_options(parser, arguments, find_problem)
    if options.validate_regex is not None:
        return _validate_regex(options)

    from kcoord.cli.group_descriptions import describe_groups, list_groups
    from kcoord.cli.group_offsets import delete_groups, delete_offsets, reset_offsets
    from kcoord.cli.session import run_with_admin

    run = {
        "list": list_groups,
        "describe": describe_groups,
        "delete": delete_groups,
        "delete_offsets": delete_offsets,
        "reset_offsets": reset_offsets,
    }
    return run_with_admin(parser.prog, options, run[_action(options)])


def make_parser() -> argparse.ArgumentParser:
    from kcoord.cli.session import add_connection_options, add_json_option

    parser = argparse.ArgumentParser(prog="kcoord consumer-groups", description=__doc__, allow_abbrev=False)
    add_connection_options(parser)
    add_json_option(parser)
    actions = parser.add_argument_group("actions (exactly one is required)")
    actions.add_argument(
        "--list", action="store_true", help="list groups; --state and --type add a column or select groups"
    )
    actions.add_argument(
        "--describe", action="store_true", help="show offsets and lag, members, state or type of groups"
    )
    actions.add_argument("--delete", action="store_true", help="delete groups without members, and their offsets")
    actions.add_argument("--delete-offsets", action="store_true", help="delete a group's offsets of some topics")
    actions.add_argument("--reset-offsets", action="store_true", help="set the offsets of groups without members")
    actions.add_argument(
        "--validate-regex",
        "--verify-regex",
        metavar="REGEX",
        help="check a regular expression for subscriptions (RE2), without a broker",
    )
    _add_scope(parser.add_argument_group("groups and topics"))
    _add_details(parser.add_argument_group("details"))
    _add_targets(parser.add_argument_group("targets of --reset-offsets (exactly one is required)"))
    _add_modes(parser.add_argument_group("modes of --reset-offsets"))
    return parser


def _add_scope(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--group", action="append", default=[], metavar="GROUP", help="a group; may be repeated")
    parser.add_argument("--all-groups", action="store_true", help="every group")
    parser.add_argument(
        "--topic",
        action="append",
        default=[],
        metavar="TOPIC[:0,1]",
        help="a topic, or a topic with partitions; may be repeated",
    )
    parser.add_argument("--all-topics", action="store_true", help="every topic that the group has offsets of")


def _add_details(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--offsets", action="store_true", help="show offsets and lag (the default of --describe)")
    parser.add_argument("--members", action="store_true", help="show members, and with --verbose their assignments")
    parser.add_argument(
        "--state",
        nargs="?",
        const="",
        metavar="STATES",
        help="show state and size, and with --verbose epochs and creation time; with --list select groups by state",
    )
    parser.add_argument(
        "--type", nargs="?", const="", metavar="TYPES", help="show the type; with --list select groups by type"
    )
    parser.add_argument("--verbose", action="store_true", help="show more columns")


def _add_targets(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--to-earliest", action="store_true", default=None, help="the log start offset")
    parser.add_argument("--to-latest", action="store_true", default=None, help="the log end offset")
    parser.add_argument(
        "--to-current",
        action="store_true",
        default=None,
        help="the committed offset, or the log end offset if there is none",
    )
    parser.add_argument("--to-offset", type=int, metavar="OFFSET")
    parser.add_argument("--shift-by", type=int, metavar="N", help="the committed offset plus N; N may be negative")
    parser.add_argument(
        "--to-datetime", metavar="TIME", help="the first record at or after TIME, such as 2026-01-31T12:00:00.000 (UTC)"
    )
    parser.add_argument(
        "--by-duration", metavar="DURATION", help="the first record since DURATION ago, such as P1D or PT1H30M"
    )
    parser.add_argument(
        "--to-start-time",
        action="store_true",
        default=None,
        help="the first record since the group was created, as auto.offset.reset=to_start_time (KIP-1282)",
    )
    parser.add_argument("--from-file", type=Path, metavar="CSV", help="the offsets of a file that --export wrote")


def _add_modes(parser: argparse._ArgumentGroup) -> None:
    parser.add_argument("--dry-run", action="store_true", help="only show the new offsets (the default)")
    parser.add_argument("--execute", action="store_true", help="commit the new offsets")
    parser.add_argument("--export", action="store_true", help="print CSV for --from-file")


def _action(options: argparse.Namespace) -> str:
    return next(action for action in ACTIONS if _is_given(options, action))


def _is_given(options: argparse.Namespace, name: str) -> bool:
    value = getattr(options, name)
    return value is not None and value is not False and value != []


def _options(names: Sequence[str]) -> str:
    return ", ".join(map(option_name, names))


def find_problem(options: argparse.Namespace) -> str | None:
    """Returns why the options cannot be combined, or None if they can."""
    given = [action for action in ACTIONS if _is_given(options, action)]
    if given == ["describe", "validate_regex"] and not options.group:
        return None  # KIP-848 combines these two options.
    if len(given) != 1:
        return f"exactly one action is needed: {_options(ACTIONS)}"
    action = given[0]
    for name, actions in _USES.items():
        if _is_given(options, name) and action not in actions:
            return f"{option_name(name)} does not go with {option_name(action)}"
    if action == "list":
        return _find_list_problem(options)
    if action == "describe":
        return _find_describe_problem(options)
    return _find_scope_problem(options, action)


def _find_list_problem(options: argparse.Namespace) -> str | None:
    try:
        states_of(options)
        types_of(options)
    except ValueError as error:
        return str(error)
    return None


def _find_describe_problem(options: argparse.Namespace) -> str | None:
    details = [name for name in ("offsets", "members", "state", "type") if _is_given(options, name)]
    if len(details) > 1:
        return f"at most one of {_options(details)}"
    if options.state or options.type:
        return "--state and --type take values with --list only"
    return _find_group_problem(options)


def _find_group_problem(options: argparse.Namespace) -> str | None:
    if bool(options.group) == options.all_groups:
        return "--group or --all-groups is needed, not both"
    return None


def _find_scope_problem(options: argparse.Namespace, action: str) -> str | None:
    if action == "delete":
        return _find_group_problem(options)
    if action == "delete_offsets":
        if len(set(options.group)) != 1 or not options.topic:
            return "--delete-offsets needs one --group and at least one --topic"
        return _find_topic_problem(options)
    if action == "reset_offsets":
        return _find_group_problem(options) or _find_reset_problem(options)
    return None


def _find_topic_problem(options: argparse.Namespace) -> str | None:
    from kcoord.cli.offset_reset import parse_topics

    try:
        parse_topics(options.topic)
    except ValueError as error:
        return str(error)
    return None


def _find_reset_problem(options: argparse.Namespace) -> str | None:
    from kcoord.cli.offset_reset import parse_age_ms, parse_datetime_ms

    targets = [name for name in TARGETS if _is_given(options, name)]
    if len(targets) != 1:
        return f"--reset-offsets needs exactly one of {_options(TARGETS)}"
    if options.dry_run and options.execute:
        return "--dry-run or --execute, not both"
    if options.export and options.json:
        return "--export or --json, not both"
    if options.from_file is not None:
        return "--from-file names the topics itself" if options.topic or options.all_topics else None
    if bool(options.topic) == options.all_topics:
        return "--topic or --all-topics is needed, not both"
    try:
        if options.to_datetime is not None:
            parse_datetime_ms(options.to_datetime)
        if options.by_duration is not None:
            parse_age_ms(options.by_duration)
    except ValueError as error:
        return str(error)
    return _find_topic_problem(options)


def _validate_regex(options: argparse.Namespace) -> int:
    """Checks a regular expression with the engine and the limits of the coordinator."""
    from kcoord.cli.output import print_json
    from kcoord.coordinator.group.regex import validate
    from kcoord_protocol.errors import KafkaError

    regex, problem = options.validate_regex, None
    try:
        validate(regex)
    except KafkaError as error:
        problem = error.message
    if options.json:
        print_json({"regex": regex, "valid": problem is None, "message": problem})
    else:
        print(f"The regular expression `{regex}` is valid." if problem is None else problem)
    return 0 if problem is None else 1
