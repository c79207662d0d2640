# SPDX-License-Identifier: Apache-2.0
"""The assignors: first assignment, one member more, one member less. CPU time, best of three, with the heap frozen."""

from __future__ import annotations

import gc
import time

from kcoord.coordinator.group.assignor import ASSIGNORS, Assignment, MemberSpec

SIZES = [(1_000, 10_000, 100), (10_000, 100_000, 1_000), (1_000, 10_000, 1), (10_000, 100_000, 1)]
ROUNDS = 3


def main() -> None:
    print("| members x partitions (topics) | assignor | first ms | +1 ms | -1 ms | moved by +1 |")
    print("|---|---|---|---|---|---|")
    for members, partitions, topics in SIZES:
        topic_ids = [number.to_bytes(16, "big") for number in range(topics)]
        counts = dict.fromkeys(topic_ids, partitions // topics)
        member_ids = [f"{number:08d}" for number in range(members + 1)]
        for name in ASSIGNORS:
            specs = dict.fromkeys(member_ids[:-1], MemberSpec(subscribed_topic_ids=frozenset(topic_ids)))
            first_ms, first = best(name, specs, counts)
            after = {member_id: spec_after(first, member_id, topic_ids) for member_id in member_ids}
            more_ms, more = best(name, after, counts)
            less_ms, _ = best(name, dict(list(after.items())[: members - 1]), counts)
            row = f"{first_ms:.1f} | {more_ms:.1f} | {less_ms:.1f} | {moved(first, more)}"
            print(f"| {members} x {partitions} ({topics}) | {name} | {row} |", flush=True)


def spec_after(assignment: Assignment, member_id: str, topic_ids: list[bytes]) -> MemberSpec:
    assigned = {topic_id: frozenset(partitions) for topic_id, partitions in assignment.get(member_id, {}).items()}
    return MemberSpec(None, None, topic_ids, assigned)


def best(name: str, specs: dict[str, MemberSpec], counts: dict[bytes, int]) -> tuple[float, Assignment]:
    shortest, assignment = float("inf"), {}
    for _ in range(ROUNDS):
        gc.collect()
        gc.freeze()
        began = time.process_time()
        assignment = ASSIGNORS[name].assign(specs, counts)
        shortest = min(shortest, time.process_time() - began)
        gc.unfreeze()
    return shortest * 1000, assignment


def moved(before: Assignment, after: Assignment) -> int:
    return sum(
        len(set(partitions) - set(before.get(member_id, {}).get(topic_id, ())))
        for member_id, topics in after.items()
        for topic_id, partitions in topics.items()
    )
