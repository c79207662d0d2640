# SPDX-License-Identifier: Apache-2.0
"""kill -9 at random moments, also during starts.

No acknowledged commit or record is lost. Deleted, aborted and rejected data does not reappear. KCOORD_SOAK_KILLS sets
the number of kills (`make soak`). KCOORD_SOAK_SEED repeats the choices.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kcoord.cli import main
from tests.soak.registers import Register
from tests.soak.streams import GroupMember, Records, Transactions, read_all
from tests.soak.worker import Worker
from tests.support.client_races import note_retry
from tests.support.confluent import committed, create_topic
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until

KILLS = int(os.environ.get("KCOORD_SOAK_KILLS", "12"))
SEED = int(os.environ.get("KCOORD_SOAK_SEED", str(random.randrange(1 << 32))))
PARTITIONS = 3
REGISTERS = 3
LONGEST_LIFE_SECONDS = 0.9
DURING_START = 0.25
"""The share of kills before the process is ready."""
END_SECONDS = 180.0 + KILLS
STUCK_SECONDS = 20.0
SETTINGS = {
    **FAST,
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "2",
    "log.cleaner.backoff.ms": "300",
    "log.cleaner.min.cleanable.ratio": "0.2",
    "log.segment.bytes": str(1 << 20),
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[KcoordProcess]:
    server = KcoordProcess(tmp_path, SETTINGS)
    server.start()
    yield server
    server.kill()


def test_kill_9(server: KcoordProcess) -> None:
    print(f"KCOORD_SOAK_SEED={SEED}")
    for topic in ("records", "transactions", "registers"):
        create_topic(server.address, topic, PARTITIONS)
    registers = [
        Register(server.port, f"register-{number}", "registers", PARTITIONS, SEED + number)
        for number in range(REGISTERS)
    ]
    records = Records(server.address, "records", PARTITIONS, SEED)
    members = [GroupMember(server.address, "members", "records") for _ in range(2)]
    members[1].delivered = members[0].delivered
    records.behind = lambda: len(records.acknowledged) - len(members[0].delivered)
    transactions = Transactions(server.address, "transactions", PARTITIONS, "transfers", SEED)
    workers: list[Worker] = [*registers, records, *members, transactions]
    for worker in workers:
        worker.start()
    kill_again_and_again(server, lambda: [worker.failure for worker in workers if worker.failure is not None])
    for register in registers:
        register.finish(END_SECONDS)
    assert sum(register.done for register in registers) > KILLS
    records.finish(END_SECONDS)
    wait_until(lambda: bool(transactions.committed), "a transaction is committed", END_SECONDS)
    transactions.finish(END_SECONDS)
    check_records(server, records)
    check_members(server, records, members)
    check_transactions(server, transactions)
    assert server.stop() == 0
    assert main(["log", "verify", str(server.data)]) == 0


def kill_again_and_again(server: KcoordProcess, failures: Callable[[], Sequence[object]]) -> None:
    chance = random.Random(SEED)
    kills = 0
    while kills < KILLS:
        time.sleep(chance.uniform(0, LONGEST_LIFE_SECONDS))
        server.kill()
        kills += 1
        # A kill does not lose the page cache, so both policies give the same guarantee here.
        server.overrides["kcoord.log.flush.policy"] = chance.choice(("fsync", "fsync", "os"))
        while kills < KILLS and chance.random() < DURING_START:
            server.spawn()
            time.sleep(chance.uniform(0, 0.5))
            server.kill()
            kills += 1
        server.start()
        assert not failures(), f"seed {SEED}, kill {kills}: {failures()}"


def check_records(server: KcoordProcess, records: Records) -> None:
    """Acknowledged records have their acknowledged offsets, without duplicates, in the order of the producer."""
    stored = read_all(server.address, "records", PARTITIONS)
    assert records.refused == []
    assert len(records.acknowledged) > KILLS
    lost = [number for number, place in records.acknowledged.items() if stored.get(place) != number]
    assert lost == [], f"seed {SEED}: acknowledged and lost"
    assert len(set(stored.values())) == len(stored), "written twice"
    for partition in range(PARTITIONS):
        numbers = [number for place, number in sorted(stored.items()) if place[0] == partition]
        assert numbers == sorted(numbers)


def check_members(server: KcoordProcess, records: Records, members: list[GroupMember]) -> None:
    """The group has consumed every record, and each acknowledged commit is stored.

    A member whose broker restarts may hang in a commit (docs/conformance.md). The last one sees no restart.
    """
    last = GroupMember(server.address, "members", "records")
    last.delivered = members[0].delivered
    last.start()

    def missing() -> set[tuple[int, int]]:
        return set(records.acknowledged.values()) - last.delivered.copy()

    wait_until(lambda: not missing(), "the group has consumed everything", END_SECONDS)
    for member in members:
        member.end()
    for member in members:
        if member.join(STUCK_SECONDS):
            member.finish(0)
        else:
            note_retry("librdkafka repeats a commit without end after restarts of its coordinator")
    last.finish(END_SECONDS)
    stored = committed(server.address, "members", [("records", partition) for partition in range(PARTITIONS)])
    for partition in range(PARTITIONS):
        promised = max(member.committed.get(partition, 0) for member in [*members, last])
        ends = max(offset for number, offset in records.acknowledged.values() if number == partition) + 1
        assert 0 < promised <= stored["records", partition] <= ends, f"seed {SEED}"


def check_transactions(server: KcoordProcess, transactions: Transactions) -> None:
    """Transactions are atomic, including their offsets."""
    unsent = transactions.unsent(read_all(server.address, "transactions", PARTITIONS, "read_uncommitted"))
    records = read_all(server.address, "transactions", PARTITIONS)
    # librdkafka sent some records of these at most.
    records = {place: number for place, number in records.items() if number not in unsent}
    seen = [{number for place, number in records.items() if place[0] == partition} for partition in range(PARTITIONS)]
    parts = set[int]().union(*seen).difference(set[int].intersection(*seen))
    places = {number: transactions.places[number] for number in parts}
    assert not parts, f"seed {SEED}: parts of transactions, acknowledged at {places}"
    assert len(records) == PARTITIONS * len(seen[0]), "written twice"
    committed_numbers = transactions.committed - unsent
    assert committed_numbers
    assert committed_numbers <= seen[0], f"seed {SEED}: lost {sorted(committed_numbers - seen[0])}"
    assert seen[0] <= committed_numbers | transactions.unknown, "an aborted transaction is visible"
    assert len(unsent) < max(len(committed_numbers) / 10, 3)
    print(f"transactions: {len(committed_numbers)} committed, unsent by the client: {sorted(unsent)}")
    partitions = [("transactions", partition) for partition in range(PARTITIONS)]
    stored = committed(server.address, "transfers", partitions)
    ends = [max(seen[0] | some) for some in (unsent, unsent - transactions.unknown)]
    assert set(stored.values()) in ({end} for end in ends), f"seed {SEED}: offsets of another transaction"
