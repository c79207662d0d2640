# SPDX-License-Identifier: Apache-2.0
"""`kcoord configs`: show and change the settings of topics, brokers, groups, users, clients, ips and client metrics.

Options and output lines are those of kafka-configs.sh. `--delete` is that of kafka-client-metrics.sh. The first
`--entity-name` or `--entity-default` is for the first `--entity-type`, and so on.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from kcoord.cli.options import parse_options
from kcoord.cli.output import print_json
from kcoord.cli.quota_configs import CLIENTS, IPS, USERS, alter_entity, describe_entities
from kcoord.cli.quota_configs import ENTITY_TYPES as QUOTA_TYPES
from kcoord.cli.session import (
    EXIT_FAILED,
    CommandError,
    add_connection_options,
    add_json_option,
    error_text,
    report_failure,
    run_with_admin,
    split_list,
)
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.model import (
    AlterConfigOp,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    ConfigResourceType,
    ConfigSource,
)
from kcoord.config.properties import parse_properties, read_text

ENTITY_TYPES = {
    "topics": ConfigResourceType.TOPIC,
    "brokers": ConfigResourceType.BROKER,
    "groups": ConfigResourceType.GROUP,
    "client-metrics": ConfigResourceType.CLIENT_METRICS,
}
_TYPE_NAMES = {kind: name for name, kind in ENTITY_TYPES.items()}
_TYPES_WITH_DEFAULT = ("brokers", *QUOTA_TYPES)
SHORT_FORMS = {
    "--topic": "topics",
    "--group": "groups",
    "--broker": "brokers",
    "--broker-defaults": "brokers",
    "--client-metrics": "client-metrics",
    "--user": USERS,
    "--user-defaults": USERS,
    "--client": CLIENTS,
    "--client-defaults": CLIENTS,
    "--ip": IPS,
    "--ip-defaults": IPS,
}
_DYNAMIC_SOURCES = {
    ConfigResourceType.TOPIC: (ConfigSource.DYNAMIC_TOPIC_CONFIG,),
    ConfigResourceType.BROKER: (ConfigSource.DYNAMIC_BROKER_CONFIG, ConfigSource.DYNAMIC_DEFAULT_BROKER_CONFIG),
    ConfigResourceType.GROUP: (ConfigSource.GROUP_CONFIG,),
    ConfigResourceType.CLIENT_METRICS: (ConfigSource.CLIENT_METRICS_CONFIG,),
}
_KAFKA_SOURCE_NAMES = {
    ConfigSource.GROUP_CONFIG: "DYNAMIC_GROUP_CONFIG",
    ConfigSource.CLIENT_METRICS_CONFIG: "DYNAMIC_CLIENT_METRICS_CONFIG",
}
# A value in brackets may contain commas.
_ASSIGNMENT = re.compile(r"\s*([^=,\s]+)\s*=\s*(\[[^\]]*\]|[^,]*)\s*(?:,|$)")

Config = Mapping[str, ConfigEntry]


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parse_options(parser, arguments, find_problem)
    return run_with_admin(parser.prog, options, _alter if options.alter else _delete if options.delete else _describe)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kcoord configs", description=__doc__, allow_abbrev=False)
    add_connection_options(parser)
    add_json_option(parser)
    actions = parser.add_mutually_exclusive_group(required=True)
    actions.add_argument("--describe", action="store_true", help="show dynamic settings, or all settings with --all")
    actions.add_argument("--alter", action="store_true", help="change settings, either all changes or none")
    actions.add_argument("--delete", action="store_true", help="delete a client metrics subscription")
    parser.add_argument(
        "--entity-type",
        action="append",
        dest="entity_types",
        default=[],
        choices=(*ENTITY_TYPES, *QUOTA_TYPES),
        help="a user and a client together mean the clients of that user",
    )
    parser.add_argument(
        "--entity-name",
        action="append",
        dest="entity_names",
        default=[],
        metavar="NAME",
        help="a topic, a broker's id, a group, a user, a client id, an ip address, or a subscription",
    )
    parser.add_argument(
        "--entity-default",
        action="append_const",
        const="",
        dest="entity_names",
        help=f"the default of all {', '.join(_TYPES_WITH_DEFAULT)}",
    )
    for option, entity_type in SHORT_FORMS.items():
        is_default = option.endswith("-defaults")
        parser.add_argument(
            option,
            action=_Entity,
            dest=argparse.SUPPRESS,
            default=argparse.SUPPRESS,
            nargs=0 if is_default else None,
            metavar=None if is_default else "NAME",
            help=f"short for --entity-type {entity_type} {'--entity-default' if is_default else '--entity-name NAME'}",
        )
    parser.add_argument("--all", action="store_true", help="show every setting with its source and its default")
    parser.add_argument("--add-config", metavar="KEY=VALUE,...", help="put a value with commas into [brackets]")
    parser.add_argument("--add-config-file", type=Path, metavar="FILE", help="a properties file with settings")
    parser.add_argument("--delete-config", metavar="KEY,...", help="reset these settings to their defaults")
    return parser


class _Entity(argparse.Action):
    """A short form such as `--topic NAME`, which replaces two options."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        entity_type = SHORT_FORMS[option_string or ""]
        types, names = namespace.entity_types, namespace.entity_names
        if len(types) != len(names) or (types and {*types, entity_type} != {USERS, CLIENTS}):
            parser.error(f"{option_string}: only a user and a client can be combined")
        entities = [*zip(types, names, strict=True), (entity_type, values if isinstance(values, str) else "")]
        # Kafka's tool has names before defaults, and clients before users, in whatever order the options come.
        entities.sort(key=lambda entity: (entity[1] == "", entity[0] != CLIENTS))
        namespace.entity_types = [entity_type for entity_type, _ in entities]
        namespace.entity_names = [name for _, name in entities]


def find_problem(options: argparse.Namespace) -> str | None:
    """Returns why the options cannot be combined, or None if they can."""
    types, names = options.entity_types, options.entity_names
    if not types:
        return f"--entity-type or one of {', '.join(SHORT_FORMS)} is needed"
    if len(types) > 1 and sorted(types) != [CLIENTS, USERS]:
        return f"Only '{USERS}' and '{CLIENTS}' entity types may be specified together"
    if len(names) > len(types):
        return "there are more entity names than entity types"
    if "" in names and types[0] not in _TYPES_WITH_DEFAULT:
        return f"only the entity types {', '.join(_TYPES_WITH_DEFAULT)} have --entity-default"
    if options.all and types[0] in QUOTA_TYPES:
        return f"--all does not go with --entity-type {types[0]}"
    changes = [options.add_config, options.add_config_file, options.delete_config]
    if options.describe:
        return "--describe changes nothing" if any(change is not None for change in changes) else None
    if options.delete:
        return _find_delete_problem(options, is_changing=any(change is not None for change in changes))
    if options.all:
        return "--all goes with --describe"
    if len(names) < len(types):
        return "--alter needs --entity-name or --entity-default for each --entity-type"
    if not any(changes):
        return "--alter needs --add-config, --add-config-file or --delete-config"
    if options.add_config is not None and options.add_config_file is not None:
        return "--add-config or --add-config-file, not both"
    try:
        parse_assignments(options.add_config or "")
    except ValueError as error:
        # The settings of users contain passwords, which no error repeats.
        return "--add-config is not KEY=VALUE,..." if USERS in types else str(error)
    return None


def _find_delete_problem(options: argparse.Namespace, *, is_changing: bool) -> str | None:
    if options.entity_types != ["client-metrics"] or not options.entity_names:
        return "--delete goes with --entity-type client-metrics and --entity-name"
    if is_changing or options.all:
        return "--delete allows only --entity-type and --entity-name"
    return None


def parse_assignments(text: str) -> dict[str, str]:
    """Parses `a=1,b=[x,y]`. Raises ValueError if the text is malformed."""
    settings = {}
    position = 0
    while position < len(text):
        match = _ASSIGNMENT.match(text, position)
        if match is None:
            raise ValueError(f"--add-config: {text[position:]!r} is not KEY=VALUE,...")
        settings[match[1]] = match[2].strip().removeprefix("[").removesuffix("]")
        position = match.end()
    return settings


async def _alter(admin: AdminClient, options: argparse.Namespace) -> int:
    settings = parse_assignments(options.add_config or "")
    if options.add_config_file is not None:
        settings = parse_properties(read_text(options.add_config_file))
    removed = split_list(options.delete_config or "")
    both = sorted(settings.keys() & set(removed))
    if both:
        raise CommandError(f"{both[0]} cannot be set and deleted at the same time")
    kind, name = options.entity_types[0], options.entity_names[0]
    if kind in QUOTA_TYPES:
        changed = await alter_entity(admin, options.entity_types, options.entity_names, settings, removed)
        title = f"config for {kind.removesuffix('s')} {name}" if name else f"default config for {kind} in the cluster"
    else:
        resource = ConfigResource(ENTITY_TYPES[kind], name)
        if kind == "brokers":
            await _require_existing(admin, resource)
        changes = [AlterConfigOp(key, value) for key, value in settings.items()]
        changes += (AlterConfigOp(key, None, AlterConfigOpType.DELETE) for key in removed)
        (await admin.incremental_alter_configs({resource: changes})).all()
        changed = len(changes)
        title = title_of(resource, "config")
    if options.json:
        print_json({"entity_type": kind, "entity_name": name, "changed": changed})
    else:
        print(f"Completed updating {title}.")
    return 0


async def _delete(admin: AdminClient, options: argparse.Namespace) -> int:
    """Deletes all settings of a subscription, and with them the subscription itself."""
    (resource,) = await _resources(admin, options)
    await _require_existing(admin, resource)
    entries = (await admin.describe_configs([resource]))[resource]
    keys = [key for key, entry in entries.items() if _is_dynamic(resource, entry)]
    changes = [AlterConfigOp(key, None, AlterConfigOpType.DELETE) for key in keys]
    (await admin.incremental_alter_configs({resource: changes})).all()
    if options.json:
        print_json({"entity_type": "client-metrics", "entity_name": resource.name, "deleted": len(changes)})
    else:
        print(f"Deleted client metrics config for {resource.name}.")
    return 0


async def _require_existing(admin: AdminClient, resource: ConfigResource) -> None:
    """Raises CommandError with Kafka's text if the resource is a subscription or a broker that does not exist.

    The check is needed because a broker describes a missing subscription as an empty one, and because a request to a
    missing broker waits for it until the timeout.
    """
    exists = True
    if resource.type is ConfigResourceType.CLIENT_METRICS:
        exists = resource in await admin.list_config_resources([resource.type])
    elif resource.type is ConfigResourceType.BROKER and resource.name:
        exists = resource.name in [str(node.node_id) for node in (await admin.describe_cluster()).nodes]
    if not exists:
        raise CommandError(f"The {_kind(resource)} '{resource.name}' doesn't exist and doesn't have dynamic config.")


def _kind(resource: ConfigResource) -> str:
    """Returns `topic`, `broker`, `group` or `client-metric`, which is Kafka's spelling."""
    return _TYPE_NAMES[resource.type].removesuffix("s")


async def _describe(admin: AdminClient, options: argparse.Namespace) -> int:
    if options.entity_types[0] in QUOTA_TYPES:
        return await describe_entities(admin, options.entity_types, options.entity_names, json=options.json)
    resources = await _resources(admin, options)
    if options.entity_names:
        await _require_existing(admin, resources[0])
    results = await admin.describe_configs(resources, include_synonyms=True)
    shown = {
        resource: {key: entry for key, entry in config.items() if options.all or _is_dynamic(resource, entry)}
        for resource, config in results.values.items()
    }
    if options.json:
        print_json([config_json(resource, shown[resource]) for resource in resources if resource in shown])
    else:
        for resource in resources:
            if resource in shown:
                print(f"{title_of(resource, 'All configs' if options.all else 'Dynamic configs')} are:")
                for line in config_lines(shown[resource]):
                    print(f"  {line}")
    for resource, error in results.errors.items():
        report_failure(f"{title_of(resource, 'configs')}: {error_text(error)}")
    return EXIT_FAILED if results.errors else 0


async def _resources(admin: AdminClient, options: argparse.Namespace) -> list[ConfigResource]:
    """Returns the named resource, or all resources of the type."""
    kind = ENTITY_TYPES[options.entity_types[0]]
    names: Iterable[str]
    if options.entity_names:
        names = options.entity_names
    elif kind is ConfigResourceType.CLIENT_METRICS:
        names = sorted(resource.name for resource in await admin.list_config_resources([kind]))
    elif kind is ConfigResourceType.TOPIC:
        names = [topic.name for topic in await admin.list_topics(include_internal=True)]
    elif kind is ConfigResourceType.BROKER:
        names = ["", *(str(node.node_id) for node in (await admin.describe_cluster()).nodes)]
    else:
        configured = [resource.name for resource in await admin.list_config_resources([kind])]
        names = sorted({*configured, *(group.group_id for group in await admin.list_groups())})
    return [ConfigResource(kind, name) for name in names]


def _is_dynamic(resource: ConfigResource, entry: ConfigEntry) -> bool:
    return entry.source in _DYNAMIC_SOURCES[resource.type]


def title_of(resource: ConfigResource, what: str) -> str:
    if resource.name == "":
        return f"{what} for the default of all brokers"
    return f"{what} for {_kind(resource)} {resource.name}"


def config_lines(config: Config) -> Iterable[str]:
    for key in sorted(config):
        entry = config[key]
        synonyms = ", ".join(
            f"{_source_name(synonym.source)}:{synonym.name}={_value_text(synonym.value)}" for synonym in entry.synonyms
        )
        yield f"{key}={_value_text(entry.value)} sensitive={str(entry.is_sensitive).lower()} synonyms={{{synonyms}}}"


def _value_text(value: str | None) -> str:
    return "null" if value is None else value


def _source_name(source: ConfigSource) -> str:
    return _KAFKA_SOURCE_NAMES.get(source, source.name)


def config_json(resource: ConfigResource, config: Config) -> dict[str, object]:
    return {
        "entity_type": _TYPE_NAMES[resource.type],
        "entity_name": resource.name,
        "configs": [
            {
                "name": entry.name,
                "value": entry.value,
                "source": _source_name(entry.source),
                "sensitive": entry.is_sensitive,
                "read_only": entry.is_read_only,
                "synonyms": [
                    {"name": synonym.name, "value": synonym.value, "source": _source_name(synonym.source)}
                    for synonym in entry.synonyms
                ],
            }
            for _, entry in sorted(config.items())
        ],
    }
