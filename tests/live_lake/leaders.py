# SPDX-License-Identifier: Apache-2.0
"""Moves the leaders of `__consumer_offsets` between three brokers with Kafka's own tools, as an operator would.

Theory of operation. The kinds of moves take turns. A reassignment gives each partition the two brokers that do not lead
it: its leader moves, and the former leader deletes its copy of the log. An election reverses the order of the replicas,
which copies nothing, and elects the preferred ones. A partition counts as moved if its leader after the turn is not the
one before it. Kills are other turns, so leaders that move because of a kill do not count.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, NamedTuple

from confluent_kafka.admin import AdminClient

from tests.live_lake.verdict import OFFSETS_TOPIC
from tests.support.kafka_jars import KafkaJars
from tests.support.waiting import wait_until

_MOVE_SECONDS: Final = 120.0
_METADATA_SECONDS: Final = 10.0


class Place(NamedTuple):
    """Where a partition is. The first replica is the preferred leader."""

    leader: int
    replicas: list[int]


Places = dict[int, Place]
"""Partition -> where it is."""


class Leaders:
    """`moved` counts how often a kind of move gave a partition another leader."""

    def __init__(self, address: str, folder: Path) -> None:
        self._address = address
        self._plan = folder / "leaders.json"
        self._jars = KafkaJars()
        self._admin = AdminClient({"bootstrap.servers": address})
        self._next_is_election = False
        self.moved = {"reassignment": 0, "election": 0}

    def move(self) -> None:
        """Moves the leaders of all partitions: in the first turn by reassignment, in the next one by election."""
        kind, move = ("election", self._elect) if self._next_is_election else ("reassignment", self._reassign_away)
        before = self._wait_for(bool, "all replicas are in sync")
        after = move(before)
        self.moved[kind] += sum(after[partition].leader != place.leader for partition, place in before.items())
        self._next_is_election = not self._next_is_election

    def _reassign_away(self, places: Places) -> Places:
        brokers = sorted(self._admin.list_topics(timeout=_METADATA_SECONDS).brokers)
        return self._reassign(
            {partition: [broker for broker in brokers if broker != leader] for partition, (leader, _) in places.items()}
        )

    def _elect(self, places: Places) -> Places:
        self._reassign(
            {
                partition: [*(replica for replica in replicas if replica != leader), leader]
                for partition, (leader, replicas) in places.items()
            }
        )
        self._tool("leader-election", "--election-type", "preferred", "--all-topic-partitions")
        return self._wait_for(
            lambda places: all(leader == replicas[0] for leader, replicas in places.values()),
            "the preferred replicas lead",
        )

    def _reassign(self, replicas: Mapping[int, list[int]]) -> Places:
        """Gives the partitions other replicas, and waits until these are in sync and no others are left."""
        partitions = [
            {"topic": OFFSETS_TOPIC, "partition": partition, "replicas": brokers}
            for partition, brokers in replicas.items()
        ]
        self._plan.write_text(json.dumps({"version": 1, "partitions": partitions}))
        self._tool("reassign", "--reassignment-json-file", str(self._plan), "--execute")
        return self._wait_for(
            lambda places: {partition: place.replicas for partition, place in places.items()} == replicas,
            "the reassignment is complete",
        )

    def _wait_for(self, is_done: Callable[[Places], bool], what: str) -> Places:
        """Waits until all replicas are in sync and the condition is true. Returns where the partitions are then."""

        def places() -> Places:
            metadata = self._admin.list_topics(OFFSETS_TOPIC, timeout=_METADATA_SECONDS).topics[OFFSETS_TOPIC]
            partitions = metadata.partitions.values()
            if any({partition.leader, *partition.replicas} != {*partition.isrs} for partition in partitions):
                return {}
            places = {partition.id: Place(partition.leader, partition.replicas) for partition in partitions}
            return places if is_done(places) else {}

        return wait_until(places, f"{OFFSETS_TOPIC}: {what}", _MOVE_SECONDS)

    def _tool(self, name: str, *arguments: str) -> None:
        self._jars.tool(name, "--bootstrap-server", self._address, *arguments)
