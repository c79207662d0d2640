# SPDX-License-Identifier: Apache-2.0
"""`kcoord topics`: create, alter, delete, list and describe topics.

Options and output lines are those of kafka-topics.sh, plus the creation times of partitions (KIP-1327).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence

from kcoord.cli.options import MOST_INT, MOST_SHORT, option_name, parse_options, whole_number
from kcoord.cli.output import print_json, time_text
from kcoord.cli.session import (
    EXIT_FAILED,
    CommandError,
    add_connection_options,
    add_json_option,
    error_json,
    error_text,
    report_failure,
    run_with_admin,
    warn,
)
from kcoord.cli.terminal import is_terminal, print_table
from kcoord.cli.topic_filters import FILTERS, add_filters, filter_of, filtered
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.model import (
    ConfigEntry,
    ConfigResource,
    ConfigResourceType,
    ConfigSource,
    CreatedTopic,
    NewPartitions,
    NewTopic,
    TopicDescription,
    TopicListing,
    TopicPartitionInfo,
)
from kcoord.client.admin.topics import PARTITIONS_PER_PAGE
from kcoord.client.results import Results
from kcoord_protocol.errors import Errors
from kcoord_protocol.uuid import uuid_to_string

ACTIONS = ("create", "alter", "delete", "list", "describe")
_USES = {
    "partitions": ("create", "alter"),
    "replication_factor": ("create",),
    "replica_assignment": ("create", "alter"),
    "config": ("create",),
    "if_exists": ("alter", "delete", "describe"),
    "if_not_exists": ("create",),
    "exclude_internal": ("list", "describe"),
    "topics_with_overrides": ("describe",),
    "topic_id": ("describe",),
    "partition_size_limit_per_response": ("describe",),
    **dict.fromkeys(FILTERS, ("describe",)),
}

Replicas = list[list[int]]


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parse_options(parser, arguments, find_problem)
    run = {
        "create": _create,
        "alter": _alter,
        "delete": _delete,
        "list": _list,
        "describe": _describe,
    }
    return run_with_admin(parser.prog, options, run[_given_actions(options)[0]])


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kcoord topics", description=__doc__, allow_abbrev=False)
    add_connection_options(parser)
    add_json_option(parser)
    actions = parser.add_argument_group("actions (exactly one is required)")
    actions.add_argument("--create", action="store_true", help="create topics")
    actions.add_argument("--alter", action="store_true", help="increase the number of partitions of topics")
    actions.add_argument("--delete", action="store_true", help="delete topics and their records")
    actions.add_argument("--list", action="store_true", help="list the names of topics")
    actions.add_argument(
        "--describe", action="store_true", help="show partitions, settings and creation times of topics"
    )
    parser.add_argument(
        "--topic",
        action="append",
        default=[],
        metavar="TOPIC",
        help="a name or, except for --create, a regular expression; may be repeated",
    )
    parser.add_argument("--partitions", type=whole_number(1), metavar="N", help="the number of partitions")
    parser.add_argument("--replication-factor", type=whole_number(1, MOST_SHORT), metavar="N")
    parser.add_argument(
        "--replica-assignment",
        metavar="1:2,2:3",
        help="the brokers of each partition, instead of --partitions and --replication-factor",
    )
    parser.add_argument(
        "--config", action="append", default=[], metavar="KEY=VALUE", help="a topic setting; may be repeated"
    )
    parser.add_argument("--if-exists", action="store_true", help="do not fail if the topic does not exist")
    parser.add_argument("--if-not-exists", action="store_true", help="do not fail if the topic already exists")
    parser.add_argument("--exclude-internal", action="store_true", help="leave out internal topics")
    parser.add_argument("--topic-id", metavar="ID", help="the topic with this id, instead of --topic")
    parser.add_argument(
        "--partition-size-limit-per-response",
        type=whole_number(1),
        metavar="N",
        help=f"the number of partitions per request (default {PARTITIONS_PER_PAGE})",
    )
    add_filters(parser)
    return parser


def _given_actions(options: argparse.Namespace) -> list[str]:
    return [action for action in ACTIONS if getattr(options, action)]


def find_problem(options: argparse.Namespace) -> str | None:
    """Returns why the options cannot be combined, or None if they can."""
    given = _given_actions(options)
    if len(given) != 1:
        return f"exactly one action is needed: {', '.join(map(option_name, ACTIONS))}"
    action = given[0]
    for name, actions in _USES.items():
        if getattr(options, name) not in (None, False, []) and action not in actions:
            return f"{option_name(name)} does not go with --{action}"
    if options.topic_id is not None and options.topic:
        return "--topic-id does not go with --topic"
    if action in ("create", "alter", "delete") and not options.topic:
        return f"--{action} needs --topic"
    if action == "alter" and options.partitions is None:
        return "--alter needs --partitions"
    if action == "create" and options.replica_assignment and (options.partitions or options.replication_factor):
        return "--replica-assignment does not go with --partitions and --replication-factor"
    try:
        parse_configs(options.config)
        parse_replica_assignment(options.replica_assignment or "")
    except ValueError as error:
        return str(error)
    for pattern in options.topic if action != "create" else ():
        try:
            re.compile(pattern)
        except re.error as error:
            return f"--topic: {pattern!r} is not a regular expression: {error}"
    return None


def parse_configs(texts: Iterable[str]) -> dict[str, str]:
    """Parses KEY=VALUE settings."""
    configs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ValueError(f"--config: {text!r} is not KEY=VALUE")
        configs[key.strip()] = value.strip()
    return configs


def parse_replica_assignment(text: str) -> Replicas:
    """Parses `1:2,2:3`: commas separate partitions, and colons separate the brokers of a partition."""
    if not text:
        return []
    partitions = [part.split(":") for part in text.split(",")]
    for broker in (broker.strip() for brokers in partitions for broker in brokers):
        if not broker.isdecimal():
            raise ValueError(f"--replica-assignment: {text!r} is not BROKER:BROKER,BROKER:BROKER,...")
        if int(broker) > MOST_INT:
            raise ValueError(f"--replica-assignment: {broker} is not the id of a broker, 0 to {MOST_INT}")
    return [[int(broker) for broker in brokers] for brokers in partitions]


# --- actions ----------------------------------------------------------------------------------------------------------


async def _create(admin: AdminClient, options: argparse.Namespace) -> int:
    replicas = parse_replica_assignment(options.replica_assignment or "")
    new_topics = [
        NewTopic(
            name,
            -1 if options.partitions is None else options.partitions,
            -1 if options.replication_factor is None else options.replication_factor,
            dict(enumerate(replicas)),
            parse_configs(options.config),
        )
        for name in options.topic
    ]
    for topic in new_topics:
        if "." in topic.name or "_" in topic.name:
            warn(f"{topic.name}: names of metrics have _ for both . and _, so topics that differ in these may collide")
    results = await admin.create_topics(new_topics)
    return _finish(results, options, "Created", _ignored(options.if_not_exists, Errors.TOPIC_ALREADY_EXISTS))


async def _alter(admin: AdminClient, options: argparse.Namespace) -> int:
    names = chosen_names(await _topics(admin, options), options)
    replicas = parse_replica_assignment(options.replica_assignment or "") or None
    new_partitions = {}
    described = await admin.describe_topics(names)
    for name in names:
        have = len(described[name].partitions)
        new_partitions[name] = NewPartitions(options.partitions, None if replicas is None else replicas[have:])
    return _finish(await admin.create_partitions(new_partitions), options, "Altered", ())


async def _delete(admin: AdminClient, options: argparse.Namespace) -> int:
    names = chosen_names(await _topics(admin, options), options)
    results = await admin.delete_topics(names)
    return _finish(results, options, "Deleted", _ignored(options.if_exists, Errors.UNKNOWN_TOPIC_OR_PARTITION))


async def _list(admin: AdminClient, options: argparse.Namespace) -> int:
    names = [topic.name for topic in await _topics(admin, options) if _is_chosen(topic.name, options)]
    if options.json:
        print_json(names)
    else:
        for name in names:
            print(name)
    return 0


async def _describe(admin: AdminClient, options: argparse.Namespace) -> int:
    names = chosen_names(await _topics(admin, options), options)
    page = options.partition_size_limit_per_response or PARTITIONS_PER_PAGE
    topics = (await admin.describe_topics(names, partitions_per_page=page)).all()
    all_configs = await _configs(admin, names)
    configs = {name: _own(entries) for name, entries in all_configs.items()}
    chosen = filter_of(options)
    shown = [topics[name] for name in names if configs[name] or not options.topics_with_overrides]
    shown = [filtered(topic, all_configs[topic.name], chosen) for topic in shown]
    if chosen is not None:
        shown = [topic for topic in shown if topic.partitions]
    if options.json:
        print_json([topic_json(topic, configs[topic.name]) for topic in shown])
        return 0
    for topic in shown:
        if is_terminal():
            _print_topic(topic, configs[topic.name], with_partitions=not options.topics_with_overrides)
            continue
        lines = list(topic_lines(topic, configs[topic.name], with_partitions=not options.topics_with_overrides))
        # With a filter only the lines of partitions are printed, as by Kafka's tool.
        for line in lines if chosen is None else lines[1:]:
            print(line)
    return 0


async def _topics(admin: AdminClient, options: argparse.Namespace) -> list[TopicListing]:
    return await admin.list_topics(include_internal=not options.exclude_internal)


def _is_chosen(name: str, options: argparse.Namespace) -> bool:
    """Whether --topic matches the name. Without --topic every name matches."""
    return not options.topic or any(re.fullmatch(pattern, name) for pattern in options.topic)


def chosen_names(topics: Iterable[TopicListing], options: argparse.Namespace) -> list[str]:
    """Returns the topics that --topic names.

    A value is a name if a topic has this name, and a regular expression otherwise. So `a.b` does not delete `a-b` too.
    Raises CommandError if a value matches nothing, unless --if-exists is given.
    """
    if options.topic_id is not None:
        named = [topic.name for topic in topics if uuid_to_string(topic.topic_id) == options.topic_id]
        if not named and not options.if_exists:
            raise CommandError(f"TopicId '{options.topic_id}' does not exist")
        return named
    names = [topic.name for topic in topics]
    if not options.topic:
        return names
    chosen: set[str] = set()
    for pattern in options.topic:
        matching = {pattern} & set(names) or {name for name in names if re.fullmatch(pattern, name)}
        if not matching and not options.if_exists:
            raise CommandError(f"Topic '{pattern}' does not exist")
        chosen |= matching
    return [name for name in names if name in chosen]


def _ignored(is_ignored: bool, error: Errors) -> tuple[Errors, ...]:
    return (error,) if is_ignored else ()


def _finish(
    results: Results[str, CreatedTopic] | Results[str, None],
    options: argparse.Namespace,
    done: str,
    ignored: tuple[Errors, ...],
) -> int:
    """Prints the outcome for each topic and returns the exit code. `ignored` errors do not count as failures."""
    errors = {name: error for name, error in results.errors.items() if error.error not in ignored}
    if options.json:
        print_json([{"topic": name, **error_json(errors.get(name))} for name in results])
    else:
        for name in results.values:
            print(f"{done} topic {name}.")
    for name, error in errors.items():
        report_failure(f"{name}: {error_text(error)}")
    return EXIT_FAILED if errors else 0


# --- describe ---------------------------------------------------------------------------------------------------------


async def _configs(admin: AdminClient, names: Iterable[str]) -> dict[str, Mapping[str, ConfigEntry]]:
    """Returns the settings of the topics. A topic that was deleted meanwhile has none."""
    resources = {name: ConfigResource(ConfigResourceType.TOPIC, name) for name in names}
    described = await admin.describe_configs(resources.values())
    return {name: described.values.get(resource, {}) for name, resource in resources.items()}


def _own(entries: Mapping[str, ConfigEntry]) -> dict[str, str | None]:
    """Returns the dynamic settings of a topic."""
    return {key: entry.value for key, entry in entries.items() if entry.source is ConfigSource.DYNAMIC_TOPIC_CONFIG}


def topic_lines(
    topic: TopicDescription, configs: Mapping[str, str | None], *, with_partitions: bool = True
) -> Iterable[str]:
    """Yields lines with tab-separated fields, as scripts expect. The creation time is the last field (KIP-1327)."""
    yield _line(_topic_fields(topic, configs))
    for partition in topic.partitions if with_partitions else ():
        yield f"\t{_line(_partition_fields(topic.name, partition))}"


def _print_topic(topic: TopicDescription, configs: Mapping[str, str | None], *, with_partitions: bool) -> None:
    """Prints a topic at a terminal: a line for the topic, a table for its partitions."""
    print("  ".join(f"{name}: {value}" for name, value in _topic_fields(topic, configs).items() if value != ""))
    if with_partitions:
        rows = [_partition_fields(topic.name, partition) for partition in topic.partitions]
        titles = [name for name in rows[0] if name != "Topic"] if rows else []
        print_table(titles, [[row[name] for name in titles] for row in rows])


def _topic_fields(topic: TopicDescription, configs: Mapping[str, str | None]) -> dict[str, object]:
    return {
        "Topic": topic.name,
        "TopicId": topic.topic_id_text,
        "PartitionCount": len(topic.partitions),
        "ReplicationFactor": len(topic.partitions[0].replicas) if topic.partitions else 0,
        "Configs": ",".join(f"{key}={value}" for key, value in configs.items()),
    }


def _partition_fields(topic: str, partition: TopicPartitionInfo) -> dict[str, object]:
    return {
        "Topic": topic,
        "Partition": partition.partition,
        "Leader": "none" if partition.leader is None else partition.leader.node_id,
        "Replicas": _brokers(partition.replicas),
        "Isr": _brokers(partition.isr),
        "Elr": _brokers(partition.eligible_leader_replicas),
        "LastKnownElr": _brokers(partition.last_known_elr),
        "CreationTimeMs": time_text(partition.creation_time_ms),
    }


def _brokers(node_ids: Sequence[int] | None) -> str:
    return "N/A" if node_ids is None else ",".join(map(str, node_ids))


def _line(fields: Mapping[str, object]) -> str:
    return "\t".join(f"{name}: {value}" for name, value in fields.items())


def topic_json(topic: TopicDescription, configs: Mapping[str, str | None]) -> dict[str, object]:
    return {
        "topic": topic.name,
        "topic_id": topic.topic_id_text,
        "internal": topic.is_internal,
        "configs": dict(configs),
        "partitions": [
            {
                "partition": partition.partition,
                "leader": None if partition.leader is None else partition.leader.node_id,
                "leader_epoch": partition.leader_epoch,
                "replicas": partition.replicas,
                "isr": partition.isr,
                "elr": partition.eligible_leader_replicas,
                "last_known_elr": partition.last_known_elr,
                "creation_time_ms": partition.creation_time_ms,
            }
            for partition in topic.partitions
        ],
    }
