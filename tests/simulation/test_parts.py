# SPDX-License-Identifier: Apache-2.0
"""The parts of the simulator: clock, network and checkers."""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest

from kcoord.simulation.checkers import Ownership, ToldEpochs
from kcoord.simulation.client import Client
from kcoord.simulation.clock import START_MS, Clock
from kcoord.simulation.network import Network, Request
from kcoord.simulation.options import Options
from kcoord.simulation.planted import FAULTS
from kcoord.simulation.runner import report, run, shrink
from kcoord.simulation.summary import FAULT_EVENTS
from kcoord.simulation.trace import Trace, ViolationError
from kcoord.simulation.world import Setup, World
from kcoord.storage.memory_file_system import Operation, keep_nothing, no_fault
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse
from kcoord_protocol.record_batch import Record, encode_batch

TOPIC = bytes(range(16))


def test_time_jumps_and_keeps_order() -> None:
    clock = Clock()
    seen: list[tuple[str, int]] = []
    clock.after(50, lambda: seen.append(("late", clock.now_ms)))
    clock.after(5, lambda: seen.append(("first", clock.now_ms)))
    clock.after(5, lambda: seen.append(("second", clock.now_ms)))
    while clock.step():
        pass
    assert seen == [("first", START_MS + 5), ("second", START_MS + 5), ("late", START_MS + 50)]


def network_of(seed: int, drop: float, duplicate: float) -> tuple[Clock, Network]:
    clock = Clock()
    options = Options.draw(Random(seed))
    options.drop_probability, options.duplicate_probability, options.network_delay_ms = drop, duplicate, 300
    return clock, Network(clock, Random(seed), options, Trace(clock))


def test_a_connection_keeps_order_and_breaks_as_a_whole() -> None:
    lost = 0
    for seed in range(20):
        clock, network = network_of(seed, drop=0.05, duplicate=0.0)
        arrived: list[int] = []
        network.broker = lambda request, arrived=arrived: arrived.append(request.correlation_id)  # type: ignore[misc]
        connection = network.connect("c", lambda correlation_id, body: None)
        for number in range(10):
            network.send(Request(connection, number, ApiKey.OFFSET_COMMIT, 9, "g", b""))
        while clock.step():
            pass
        assert arrived == list(range(len(arrived)))
        lost += len(arrived) < 10
    assert 0 < lost < 20


def test_a_duplicate_follows_its_original() -> None:
    clock, network = network_of(1, drop=0.0, duplicate=0.5)
    arrived: list[int] = []
    network.broker = lambda request: arrived.append(request.correlation_id)
    connection = network.connect("c", lambda correlation_id, body: None)
    for number in range(20):
        network.send(Request(connection, number, ApiKey.OFFSET_COMMIT, 9, "g", b""))
    while clock.step():
        pass
    assert arrived == sorted(arrived)
    assert len(arrived) > 20


def test_a_partition_has_one_owner() -> None:
    ownership = Ownership()
    ownership.grant("g", "a", {(TOPIC, 0), (TOPIC, 1)})
    ownership.grant("g", "a", {(TOPIC, 0)})
    ownership.grant("other", "b", {(TOPIC, 0)})
    ownership.release("g", "a", {(TOPIC, 1)})
    ownership.grant("g", "b", {(TOPIC, 1)})
    assert ownership.owned("g") == {(TOPIC, 0): "a", (TOPIC, 1): "b"}
    with pytest.raises(ViolationError, match=r"^I-1 "):
        ownership.grant("g", "b", {(TOPIC, 0)})


def test_told_epochs_do_not_go_back() -> None:
    epochs = ToldEpochs()
    epochs.told("g", "a", 4)
    epochs.told("g", "b", 3)
    epochs.told("g", "a", 4)
    with pytest.raises(ViolationError, match=r"^I-5 "):
        epochs.told("g", "a", 3)


def test_what_is_left_out_changes_nothing_else() -> None:
    """Disturbances have random streams of their own: that is what makes shrinking work."""
    whole = run(Setup(11, steps=300))
    same = run(Setup(11, steps=300))
    shorter = run(Setup(11, steps=300, without=frozenset({0})))
    assert whole.trace_hash == same.trace_hash != shorter.trace_hash
    assert shorter.options == whole.options
    left = [line.split(":", 1)[0] for line in shorter.disturbances]
    assert "0" not in left


def test_a_failure_shrinks_to_a_few_disturbances() -> None:
    fault = FAULTS["compaction-loses-the-newest-value"]
    failed = next(outcome for seed in range(20) if (outcome := run(Setup(seed), fault)).failure)
    shrunk = shrink(failed, fault)
    assert shrunk.invariant == failed.invariant
    assert len(shrunk.disturbances) < len(failed.disturbances)
    assert any("clean" in line for line in shrunk.disturbances)
    assert f"kcoord simulate --seed {failed.seed}" in report(shrunk)


def test_faults_can_be_left_out() -> None:
    outcome = run(Setup(5, steps=600, faults=frozenset()))
    assert not outcome.failure, report(outcome)
    assert not FAULT_EVENTS & outcome.counts.keys()


class Watcher:
    """A client of a user's own, as docs/simulation.md describes it: describes a group again and again."""

    def __init__(self, world: World) -> None:
        self._client = WatchingClient("watcher", world.clock, world.stream("watcher"), world.network, world.options)

    def start(self) -> None:
        self._client.ask()

    def settle(self) -> None:
        self._client.answers = 0

    def is_settled(self) -> bool:
        return self._client.answers > 0


class WatchingClient(Client):
    answers = 0

    def ask(self) -> None:
        request = ConsumerGroupDescribeRequest(group_ids=["group-0"])
        self.request(ApiKey.CONSUMER_GROUP_DESCRIBE, 1, "group-0", request, self._on_answer)

    def on_timeout(self) -> None:
        self.clock.after(100, self.ask)

    def _on_answer(self, body: bytes) -> None:
        assert ConsumerGroupDescribeResponse.decode(body, 1) is not None
        self.answers += 1
        self.clock.after(500, self.ask)


def test_the_example_of_the_documentation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs/simulation.md").read_text()
    section = text.split("## Your own consumer logic", 1)[1].split("\n## ", 1)[0]
    code = "\n".join(line[4:] for line in section.splitlines() if line.startswith("    ") or not line)
    exec(compile(code, "docs/simulation.md", "exec"), {"__name__": "example"})
    assert re.fullmatch(r"[0-9a-f]{64}\n", capsys.readouterr().out)


def test_what_a_slow_link_carries_takes_time_by_its_size() -> None:
    clock, network = network_of(1, drop=0.0, duplicate=0.0)
    answered: list[int] = []
    network.broker = lambda request: network.respond(request, bytes(30))
    connection = network.connect("c", lambda correlation_id, body: answered.append(clock.now_ms - START_MS))
    network.slow_down("c", START_MS + 100_000, 1, reads_only=True)
    network.send(Request(connection, 1, ApiKey.OFFSET_COMMIT, 9, "g", bytes(50)))
    while clock.step():
        pass
    network.slow_down("c", START_MS + 100_000, 1, reads_only=False)
    network.send(Request(connection, 2, ApiKey.OFFSET_COMMIT, 9, "g", bytes(50)))
    while clock.step():
        pass
    reading, both = answered[0], answered[1] - answered[0]
    assert 30_000 < reading < 31_000
    assert 80_000 < both < 81_000


def test_clients_of_a_users_own_take_part() -> None:
    outcome = run(Setup(2, steps=500, make_clients=lambda world: [Watcher(world)]))
    assert not outcome.failure, report(outcome)
    assert outcome.trace_hash != run(Setup(2, steps=500)).trace_hash


def test_a_log_whose_close_fails_is_written_again_when_it_is_opened() -> None:
    """A failed sync may drop what it should write. Programs see that, and no later sync writes it (D-3)."""
    broker = World(Setup(1, faults=frozenset())).broker
    broker.start()
    assert broker.process is not None
    shards = broker.process.groups
    path = f"{shards.logs[0].directory}/00000000000000000000.log"
    batch = encode_batch([Record(b"key", b"value", timestamp_ms=START_MS)], base_offset=shards.logs[0].end_offset)
    shards.logs[0].append(batch, now_ms=START_MS)

    def fails_to_sync(operation: Operation) -> BaseException | None:
        return OSError(5, "simulated") if (operation.kind, operation.path) == ("datasync", path) else None

    assert shards.give_up(0)
    broker.disk.fault = fails_to_sync
    shards.load(0)
    assert 0 not in shards.logs
    broker.disk.fault = no_fault
    shards.load(0)
    assert shards.logs[0].end_offset == 1
    broker.disk.crash(keep_nothing)
    file = broker.disk.open_read(path)
    assert file.read_at(0, file.size()) == batch
