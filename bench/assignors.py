# SPDX-License-Identifier: Apache-2.0
"""CPU time of the assignors: first assignment, one more member, one less member. Best of three, with a frozen heap."""

from __future__ import annotations

import gc
import time
from random import Random

from bench.report import Report, Table
from kcoord.coordinator.group.assignor import ASSIGNORS, Assignment, MemberSpec

RACKS = ("a", "b", "c")
"""Racks of members and of replicas; each partition has one replica. Only `uniform-rack` looks at them."""
SIZES = [(1_000, 10_000, 100), (10_000, 100_000, 1_000), (1_000, 10_000, 1), (10_000, 100_000, 1)]
ROUNDS = 3


def main(report: Report) -> None:
    table = report.table(
        "assignors, CPU", "members x partitions (topics)", "assignor", "first ms", "+1 ms", "-1 ms", "moved by +1"
    )
    for members, partitions, topics in SIZES:
        topic_ids = [number.to_bytes(16, "big") for number in range(topics)]
        counts = dict.fromkeys(topic_ids, partitions // topics)
        member_ids = [f"{number:08d}" for number in range(members + 1)]
        for name in ASSIGNORS:
            alike = [MemberSpec(rack_id=rack, subscribed_topic_ids=frozenset(topic_ids)) for rack in RACKS]
            specs = {member_id: alike[int(member_id) % 3] for member_id in member_ids[:-1]}
            first_ms, first = best(name, specs, counts)
            after = {member_id: spec_after(first, member_id, topic_ids) for member_id in member_ids}
            more_ms, more = best(name, after, counts)
            less_ms, _ = best(name, dict(list(after.items())[: members - 1]), counts)
            shape = f"{members:,} x {partitions:,} ({topics:,})"
            table.row(shape, name, first_ms, more_ms, less_ms, moved(first, more))
    different_subscriptions(table)


def different_subscriptions(table: Table) -> None:
    """Measures 10,000 members and 1,000 topics of 100 partitions.

    There are four sets of subscriptions:

    * three overlapping subscriptions,
    * a hundred disjoint subscriptions,
    * fifty random subscriptions to a tenth of the topics, and one to all topics,
    * a random subscription to ten topics for each member.
    """
    topic_ids = [number.to_bytes(16, "big") for number in range(1_000)]
    counts = dict.fromkeys(topic_ids, 100)
    random = Random(1)
    kinds = {
        "3 subscriptions": [frozenset(topic_ids), frozenset(topic_ids[:500]), frozenset(topic_ids[300:])],
        "100 disjoint": [frozenset(topic_ids[start : start + 10]) for start in range(0, 1_000, 10)],
        "51 by lot": [*(frozenset(random.sample(topic_ids, 100)) for _ in range(50)), frozenset(topic_ids)],
        "10,001 by lot": [frozenset(random.sample(topic_ids, 10)) for _ in range(10_001)],
    }
    for shape, subscriptions in kinds.items():
        for name in ASSIGNORS:
            specs = {
                f"{number:08d}": MemberSpec(None, RACKS[number % 3], subscriptions[number % len(subscriptions)])
                for number in range(10_001)
            }
            late = specs.popitem()
            first_ms, first = best(name, specs, counts)
            after = {
                member_id: MemberSpec(None, spec.rack_id, spec.subscribed_topic_ids, first[member_id])
                for member_id, spec in specs.items()
            }
            more_ms, more = best(name, {**after, late[0]: late[1]}, counts)
            less_ms, _ = best(name, dict(list(after.items())[:-1]), counts)
            table.row(f"10,000 x 100,000 (1,000), {shape}", name, first_ms, more_ms, less_ms, moved(first, more))


def spec_after(assignment: Assignment, member_id: str, topic_ids: list[bytes]) -> MemberSpec:
    assigned = {topic_id: frozenset(partitions) for topic_id, partitions in assignment.get(member_id, {}).items()}
    return MemberSpec(None, RACKS[int(member_id) % 3], topic_ids, assigned)


def partition_racks(topic_id: bytes, count: int) -> list[frozenset[str]]:
    return [frozenset({RACKS[(topic_id[-1] + number) % 3]}) for number in range(count)]


def best(name: str, specs: dict[str, MemberSpec], counts: dict[bytes, int]) -> tuple[float, Assignment]:
    shortest, assignment = float("inf"), {}
    racks = {topic_id: partition_racks(topic_id, count) for topic_id, count in counts.items()}
    for _ in range(ROUNDS):
        gc.collect()
        gc.freeze()
        began = time.process_time()
        assignment = ASSIGNORS[name].assign(specs, counts, racks.__getitem__)
        shortest = min(shortest, time.process_time() - began)
        gc.unfreeze()
    return shortest * 1000, assignment


def moved(before: Assignment, after: Assignment) -> int:
    return sum(
        len(set(partitions) - set(before.get(member_id, {}).get(topic_id, ())))
        for member_id, topics in after.items()
        for topic_id, partitions in topics.items()
    )
