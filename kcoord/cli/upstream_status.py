# SPDX-License-Identifier: Apache-2.0
"""`kcoord upstream status`: the instances of kcoord, the cluster behind them, and the groups of both sides.

The owners of the shards are those that the instances have agreed on: the assignment of their group in the upstream. A
group that kcoord does not list is shown with what an import would do now, and with its lag.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from kcoord.cli.output import OutputColumn, Row, print_json
from kcoord.cli.session import EXIT_FAILED, error_text, warn
from kcoord.cli.terminal import print_table
from kcoord.cli.upstream_groups import ask_for_import, committed
from kcoord.cli.upstream_sides import Sides, portions
from kcoord.client.admin.model import ConfigResource, ConfigResourceType, GroupListing, OffsetSpec
from kcoord.client.cluster import Cluster, CoordinatorType
from kcoord.client.types import OffsetAndMetadata, TopicPartition
from kcoord.runtime.shard_map import NOBODY, ShardMap, decode_map
from kcoord.upstream.own_topics import OFFSETS_TOPIC
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import DecodeError, KafkaError
from kcoord_protocol.messages import (
    DescribeGroupsRequest,
    DescribeGroupsResponse,
    ListGroupsRequest,
    ListGroupsResponse,
)

_GROUP_ID: Final = "kcoord.upstream.group.id"
_DESCRIBE_GROUPS_VERSION: Final = 5
_SHOWN_APIS: Final = (ApiKey.PRODUCE, ApiKey.FETCH, ApiKey.CONSUMER_GROUP_HEARTBEAT)


def ranges_text(value: object) -> str:
    """Formats numbers as `0-24,30`."""
    assert isinstance(value, Sequence)
    runs: list[list[int]] = []
    for number in sorted(value):
        if runs and runs[-1][-1] == number - 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number])
    return ",".join("-".join(map(str, run)) for run in runs) or "-"


def _versions_text(value: object) -> str:
    return f"v{value[0]}-v{value[1]}" if isinstance(value, Sequence) else "-"


def _counts_text(value: object) -> str:
    assert isinstance(value, Mapping)
    return ", ".join(f"{count} {name}" for name, count in value.items()) or "-"


_INSTANCE: Final = (
    OutputColumn("INSTANCE", "node_id"),
    OutputColumn("ADDRESS", "address"),
    OutputColumn("GROUPS", "groups"),
    OutputColumn("SHARDS", "shards", ranges_text),
)
_BROKER: Final = (
    OutputColumn("BROKER", "node_id"),
    OutputColumn("ADDRESS", "address"),
    OutputColumn("FOR CLIENTS", "gateway"),
    *(OutputColumn(api.name.replace("_", " "), api.name.lower(), _versions_text) for api in _SHOWN_APIS),
)
_TOPIC: Final = (
    OutputColumn("TOPIC", "name"),
    OutputColumn("PARTITIONS", "partitions"),
    OutputColumn("REPLICAS", "replicas"),
    OutputColumn("MIN IN SYNC", "min_in_sync"),
    OutputColumn("UNDER-REPLICATED", "under_replicated"),
    OutputColumn("WITHOUT LEADER", "without_leader"),
)
_SIDE: Final = (
    OutputColumn("GROUPS OF", "side"),
    OutputColumn("COUNT", "count"),
    OutputColumn("STATES", "states", _counts_text),
)
_ONLY: Final = (
    OutputColumn("ONLY UPSTREAM", "group"),
    OutputColumn("STATE", "state"),
    OutputColumn("OFFSETS", "offsets"),
    OutputColumn("LAG", "lag"),
    OutputColumn("IMPORT", "import"),
)


async def show_status(sides: Sides, options: argparse.Namespace) -> int:
    cluster = Cluster(sides.upstream.config)
    try:
        await cluster.start(cluster.deadline())
        brokers = [await _broker(sides, cluster, node_id) for node_id in sorted(cluster.metadata.brokers)]
        shard_map = await _shard_map(cluster, sides.config[_GROUP_ID].value or "")
    finally:
        await cluster.close()
    topic = await _topic(sides)
    instances, groups = await _instances(sides, shard_map)
    theirs = await sides.upstream.list_consumer_groups()
    names = set(options.group)
    only = [group for group in theirs if group.group_id not in groups and (not names or group.group_id in names)]
    document: dict[str, Sequence[Row]] = {
        "instances": instances,
        "brokers": brokers,
        "topic": [topic],
        "groups": [_side("kcoord", groups.values()), _side("upstream", theirs)],
        "only_upstream": await _only_upstream(sides, only),
    }
    problems = list(_problems(document, shard_map))
    if options.json:
        print_json({**document, "topic": topic, "problems": problems})
    else:
        _print(document)
    for problem in problems:
        warn(problem)
    return EXIT_FAILED if problems else 0


def _print(document: Mapping[str, Sequence[Row]]) -> None:
    tables = zip((_INSTANCE, _BROKER, _TOPIC, _SIDE, _ONLY), document.values(), strict=True)
    is_first = True
    for columns, rows in tables:
        if not rows:
            continue
        if not is_first:
            print()
        is_first = False
        print_table(
            [column.title for column in columns], [[column.text(row[column.key]) for column in columns] for row in rows]
        )


# --- brokers, instances and shards ------------------------------------------------------------------------------------


async def _broker(sides: Sides, cluster: Cluster, node_id: int) -> Row:
    """Returns a broker of the upstream. Its versions are missing if it does not answer."""
    node = cluster.metadata.brokers[node_id]
    gateway = sides.cluster.metadata.brokers.get(node_id)
    row: dict[str, object] = {
        "node_id": node_id,
        "address": f"{node.host}:{node.port}",
        "gateway": None if gateway is None else f"{gateway.host}:{gateway.port}",
        **dict.fromkeys(api.name.lower() for api in _SHOWN_APIS),
    }
    try:
        versions = (await cluster.connection(node_id)).versions
    except KafkaError as error:
        warn(f"broker {node_id} of the upstream at {node.host}:{node.port} cannot be reached: {error_text(error)}")
        return row
    for api in _SHOWN_APIS:
        row[api.name.lower()] = versions.range_of(api)
    return row


async def _shard_map(cluster: Cluster, group_id: str) -> ShardMap | None:
    """Returns the assignment of the instances' group; None while the group has none."""
    response = await cluster.retry(
        f"describe {group_id}",
        cluster.deadline(),
        lambda: cluster.call_coordinator(
            CoordinatorType.GROUP,
            group_id,
            DescribeGroupsRequest(groups=[group_id]),
            DescribeGroupsResponse,
            lambda answer: [group.error_code for group in answer.groups],
            highest=_DESCRIBE_GROUPS_VERSION,
        ),
    )
    for group in response.groups:
        for member in group.members:
            try:
                return decode_map(member.member_assignment)
            except DecodeError:
                # The member has no assignment yet, or it is no instance of kcoord.
                continue
    return None


async def _instances(sides: Sides, shard_map: ShardMap | None) -> tuple[list[Row], dict[str, GroupListing]]:
    """Returns the instances that answer or own shards, and all groups that they list."""
    addresses = {node.node_id: f"{node.host}:{node.port}" for node in sides.instances}
    if shard_map is not None:
        addresses = {
            node_id: f"{instance.host}:{instance.port}" for node_id, instance in shard_map.instances.items()
        } | addresses
    answering = {node.node_id for node in sides.instances}
    groups: dict[str, GroupListing] = {}
    rows: list[Row] = []
    for node_id, address in sorted(addresses.items()):
        own: list[GroupListing] | None = None
        if node_id in answering:
            own = await _listed(sides.cluster, node_id)
            groups |= {group.group_id: group for group in own}
        rows.append(
            {
                "node_id": node_id,
                "address": address,
                "groups": None if own is None else len(own),
                "shards": [] if shard_map is None else shard_map.shards_of(node_id),
            }
        )
    return rows, groups


async def _listed(cluster: Cluster, node_id: int) -> list[GroupListing]:
    connection = await cluster.connection(node_id)
    response = await connection.call(ListGroupsRequest(), ListGroupsResponse)
    return [
        GroupListing(group.group_id, group.protocol_type, group.group_state, group.group_type)
        for group in response.groups
    ]


async def _topic(sides: Sides) -> Row:
    partitions = (await sides.upstream.describe_topics([OFFSETS_TOPIC]))[OFFSETS_TOPIC].partitions
    resource = ConfigResource(ConfigResourceType.TOPIC, OFFSETS_TOPIC)
    config = (await sides.upstream.describe_configs([resource]))[resource]
    return {
        "name": OFFSETS_TOPIC,
        "partitions": len(partitions),
        "replicas": min((len(partition.replicas) for partition in partitions), default=0),
        "min_in_sync": config["min.insync.replicas"].value if "min.insync.replicas" in config else None,
        "under_replicated": sum(len(partition.isr) < len(partition.replicas) for partition in partitions),
        "without_leader": sum(partition.leader is None for partition in partitions),
    }


# --- groups -----------------------------------------------------------------------------------------------------------


def _side(name: str, groups: Iterable[GroupListing]) -> Row:
    states = Counter(group.state or "unknown" for group in groups)
    return {"side": name, "count": sum(states.values()), "states": dict(sorted(states.items()))}


async def _only_upstream(sides: Sides, groups: Sequence[GroupListing]) -> list[Row]:
    """Returns the groups that kcoord does not have, with what an import would do."""
    rows: list[Row] = []
    for portion in portions(groups):
        ids = [group.group_id for group in portion]
        offsets = await committed(sides.upstream, ids)
        results = await ask_for_import(sides, ids, dry_run=True)
        for group in portion:
            own = offsets[group.group_id]
            readable = {} if isinstance(own, KafkaError) else own
            rows.append(
                {
                    "group": group.group_id,
                    "state": group.state,
                    "offsets": len(readable),
                    "lag": await _lag(sides, readable),
                    "import": results[group.group_id].text,
                }
            )
    return rows


async def _lag(sides: Sides, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> int:
    """Returns the number of records behind the committed offsets. Partitions that do not exist count as 0."""
    ends = await sides.upstream.list_offsets(dict.fromkeys(offsets, OffsetSpec.latest()))
    return sum(max(end.offset - offsets[partition].offset, 0) for partition, end in ends.values.items())


# --- problems ---------------------------------------------------------------------------------------------------------


def _problems(document: Mapping[str, Sequence[Row]], shard_map: ShardMap | None) -> Iterable[str]:
    """Yields what keeps groups or data from being served."""
    if shard_map is None:
        yield "the instances have not agreed on the owners of shards yet"
    else:
        unowned = [shard_id for shard_id, owner in enumerate(shard_map.owners) if owner == NOBODY]
        if unowned:
            yield f"no instance owns the shards {ranges_text(unowned)}"
    for instance in document["instances"]:
        if instance["groups"] is None and instance["shards"]:
            yield f"instance {instance['node_id']} at {instance['address']} owns shards, but does not answer"
    for broker in document["brokers"]:
        if broker["gateway"] is None:
            yield f"clients cannot use broker {broker['node_id']} of the upstream: no instance has a port for it"
    (topic,) = document["topic"]
    if topic["without_leader"]:
        yield f"{topic['without_leader']} partitions of {OFFSETS_TOPIC} have no leader"
