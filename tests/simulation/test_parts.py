# SPDX-License-Identifier: Apache-2.0
"""The parts of the simulation: clock, network, clients, checkers, ledger, event loop, shrinking."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from random import Random

import pytest

from kcoord.metadata.image import MetadataImage
from kcoord.simulation.checkers import AcknowledgedCommits, PartitionOwners, ToldEpochs
from kcoord.simulation.client import Scene, SimulatedClient
from kcoord.simulation.clock import START_MS, VirtualClock
from kcoord.simulation.consumer import ModelConsumer
from kcoord.simulation.ledger import CACHED_TOPIC, FLUSHED_TOPIC, Attempt, Ledger, Place, Transaction
from kcoord.simulation.loop import SimulatedLoop, UnixSockets
from kcoord.simulation.network import Network, SimulatedConnection
from kcoord.simulation.observer import Observer
from kcoord.simulation.options import Options
from kcoord.simulation.planted import FAULTS
from kcoord.simulation.process import TOPICS
from kcoord.simulation.promises import PromisedSubscription, Promises
from kcoord.simulation.runner import report, run, shrink
from kcoord.simulation.summary import FAULT_EVENTS
from kcoord.simulation.trace import Trace, ViolationError
from kcoord.simulation.world import Setup, World
from kcoord.storage.memory_file_system import Operation, keep_nothing, no_fault
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import encode_response
from kcoord_protocol.messages import ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse
from kcoord_protocol.record_batch import Record, encode_batch

TOPIC = bytes(range(16))
ASSIGNOR = """
from kcoord.assignors import ServerAssignor

class Turns(ServerAssignor):
    name = "turns"

    def assign(self, members, topics):
        with open({path!r}, "a") as file:
            print(sorted(members), file=file)
        assignment = {{member_id: {{}} for member_id in sorted(members)}}
        for name, topic in topics.items():
            readers = [member_id for member_id in assignment if name in members[member_id].topics]
            for partition in range(topic.partition_count):
                assignment[readers[partition % len(readers)]].setdefault(name, []).append(partition)
        return assignment
"""


def test_time_jumps_and_keeps_order() -> None:
    clock = VirtualClock()
    seen: list[tuple[str, int]] = []
    clock.after(50, lambda: seen.append(("late", clock.now_ms)))
    clock.after(5, lambda: seen.append(("first", clock.now_ms)))
    clock.after(5, lambda: seen.append(("second", clock.now_ms)))
    while clock.step():
        pass
    assert seen == [("first", START_MS + 5), ("second", START_MS + 5), ("late", START_MS + 50)]


def network_of(seed: int, drop: float, duplicate: float) -> tuple[VirtualClock, Network]:
    clock = VirtualClock()
    options = Options.draw(Random(seed))
    options.drop_probability, options.duplicate_probability, options.network_delay_ms = drop, duplicate, 300
    return clock, Network(clock, Random(seed), options, Trace(clock))


class Receiver:
    """A broker that notes the requests it gets, and responds with `answer` if that is not empty."""

    def __init__(self, network: Network, answer: bytes = b"") -> None:
        self.arrived: list[int] = []
        self.hung_up = 0
        self._network = network
        self._answer = answer
        network.broker = self

    def receive(self, connection: SimulatedConnection, data: bytes) -> None:
        self.arrived.append(data[0])
        if self._answer:
            self._network.respond(connection, self._answer)

    def hang_up(self, connection: SimulatedConnection) -> None:
        self.hung_up += 1


def ignore(data: bytes) -> None:
    """Ignores a response."""


def test_a_connection_keeps_order_and_breaks_as_a_whole() -> None:
    lost = 0
    for seed in range(20):
        clock, network = network_of(seed, drop=0.05, duplicate=0.0)
        receiver = Receiver(network)
        connection = network.connect("c", ignore)
        for number in range(10):
            network.send(connection, bytes([number]))
        while clock.step():
            pass
        arrived = receiver.arrived
        assert arrived == list(range(len(arrived)))
        assert receiver.hung_up == (len(arrived) < 10)
        lost += len(arrived) < 10
    assert 0 < lost < 20


def test_a_duplicate_follows_its_original() -> None:
    clock, network = network_of(1, drop=0.0, duplicate=0.5)
    receiver = Receiver(network)
    connection = network.connect("c", ignore)
    for number in range(20):
        network.send(connection, bytes([number]))
    while clock.step():
        pass
    assert receiver.arrived == sorted(receiver.arrived)
    assert len(receiver.arrived) > 20


def test_a_client_that_is_cut_off_loses_the_rest_of_its_connection() -> None:
    clock, network = network_of(1, drop=0.0, duplicate=0.0)
    receiver = Receiver(network)
    connection = network.connect("c", ignore)
    network.send(connection, b"\1")
    network.cut_off("c", START_MS + 10, requests=True, responses=False)
    network.send(connection, b"\2")

    def send_later() -> None:
        network.send(connection, b"\3")

    clock.after(1_000, send_later)
    while clock.step():
        pass
    assert receiver.arrived == []
    assert receiver.hung_up == 0


class Asker(SimulatedClient):
    """A client that sends requests without waiting, and notes which ones were answered."""

    def __init__(self, clock: VirtualClock, network: Network) -> None:
        super().__init__("asker", Scene(clock, network, Options.draw(Random(1)), Trace(clock), Random))
        self.answers: list[int] = []
        self.timeouts = 0

    def ask(self, number: int) -> None:
        request = ConsumerGroupDescribeRequest(group_ids=["group-0"])
        self.request(ApiKey.CONSUMER_GROUP_DESCRIBE, 1, "group-0", request, lambda body: self.answers.append(number))

    def on_timeout(self) -> None:
        self.timeouts += 1


def answer_to(correlation_id: int) -> bytes:
    body = ConsumerGroupDescribeResponse(groups=[]).encode(1)
    return encode_response(correlation_id, ApiKey.CONSUMER_GROUP_DESCRIBE, 1, body)


def test_responses_in_one_write_are_matched_to_their_requests() -> None:
    clock, network = network_of(1, drop=0.0, duplicate=0.0)
    asker = Asker(clock, network)
    asker.ask(1)
    asker.ask(2)
    asker._on_data(answer_to(1) + answer_to(2))
    assert asker.answers == [1, 2]
    assert not asker.is_waiting


def test_a_response_that_overtakes_another_is_a_violation() -> None:
    clock, network = network_of(1, drop=0.0, duplicate=0.0)
    asker = Asker(clock, network)
    asker.ask(1)
    asker.ask(2)
    with pytest.raises(ViolationError, match=r"^I-27 "):
        asker._on_data(answer_to(2))


def test_requests_without_a_response_cause_one_timeout() -> None:
    clock, network = network_of(1, drop=0.0, duplicate=0.0)
    Receiver(network)
    asker = Asker(clock, network)
    asker.ask(1)
    asker.ask(2)
    while clock.step():
        pass
    assert asker.timeouts == 1
    assert asker.answers == []


def test_a_member_that_has_crashed_stays_silent() -> None:
    """Otherwise it keeps its instance id, and its successor never gets in (seed 20014 of `client-assignors`)."""
    clock, network = network_of(1, drop=0.0, duplicate=0.0)
    receiver = Receiver(network)
    trace = Trace(clock)
    scene = Scene(clock, network, Options.draw(Random(1)), trace, Random)
    promises = Promises(
        trace, PartitionOwners(), ToldEpochs(), AcknowledgedCommits(Observer(trace)), MetadataImage.empty
    )
    subscription = PromisedSubscription(["topic-0"])
    member = ModelConsumer("member", "group-0", "instance", subscription, None, scene, Random(1), promises)
    member.crash()
    member.subscribe(PromisedSubscription(["topic-1"]))
    while clock.step():
        pass
    assert receiver.arrived == []


def test_a_partition_has_one_owner() -> None:
    ownership = PartitionOwners()
    ownership.grant("g", "a", {(TOPIC, 0), (TOPIC, 1)})
    ownership.grant("g", "a", {(TOPIC, 0)})
    ownership.grant("other", "b", {(TOPIC, 0)})
    ownership.release("g", "a", {(TOPIC, 1)})
    ownership.grant("g", "b", {(TOPIC, 1)})
    assert ownership.owned("g") == {(TOPIC, 0): "a", (TOPIC, 1): "b"}
    with pytest.raises(ViolationError, match=r"^I-1 "):
        ownership.grant("g", "b", {(TOPIC, 0)})


def test_member_epochs_in_responses_do_not_decrease() -> None:
    epochs = ToldEpochs()
    epochs.told("g", "a", 4)
    epochs.told("g", "b", 3)
    epochs.told("g", "a", 4)
    with pytest.raises(ViolationError, match=r"^I-5 "):
        epochs.told("g", "a", 3)


FLUSHED, CACHED = Place(FLUSHED_TOPIC, 0), Place(CACHED_TOPIC, 0)


class Book:
    """A ledger with values "f0" to "f9" sent to the flushed topic and "c0" to "c9" sent to the cached one.

    Each value was sent once. Tests may raise `power_losses`.
    """

    def __init__(self, transaction: Transaction | None = None) -> None:
        self.power_losses = 0
        self.ledger = Ledger(lambda: self.power_losses, lambda: START_MS)
        for number in range(10):
            self.ledger.attempt(b"f%d" % number, Attempt(FLUSHED, 1, "producer", number, transaction))
            self.ledger.attempt(b"c%d" % number, Attempt(CACHED, 1))

    def acknowledge(self, place: Place, *values: bytes, first_offset: int = 0) -> None:
        for offset, value in enumerate(values, first_offset):
            self.ledger.acknowledge(place, offset, value, self.power_losses)

    def read(self, place: Place, *values: bytes, first_offset: int = 0, committed: bool = False) -> None:
        value_by_offset = {first_offset + number: value for number, value in enumerate(values) if value}
        glance = self.ledger.glance()
        self.ledger.read(place, first_offset, first_offset + len(values), value_by_offset, glance, committed=committed)


def test_a_reader_has_to_get_the_acknowledged_records() -> None:
    book = Book()
    book.acknowledge(FLUSHED, b"f0", b"f1")
    book.read(FLUSHED, b"f0", b"f1", b"f2")
    for wrong in ((b"f0", b""), (b"f0", b"f3"), (b"f1",), (b"f0", b"f1", b"f2", b"f2"), (b"c0",)):
        with pytest.raises(ViolationError, match=r"^L-[12] "):
            book.read(FLUSHED, *wrong)
    with pytest.raises(ViolationError, match=r"^L-2 "):
        book.acknowledge(FLUSHED, b"f5", b"f4", first_offset=5)
    with pytest.raises(ViolationError, match=r"^L-1 "):
        book.ledger.ends_at(FLUSHED, 1, book.ledger.glance())


def test_a_power_loss_may_take_records_that_were_not_promised() -> None:
    book = Book()
    book.acknowledge(FLUSHED, b"f0", b"f1")
    book.read(FLUSHED, b"f2", first_offset=2)
    book.acknowledge(CACHED, b"c0", b"c1")
    before = book.ledger.glance()
    book.power_losses += 1
    book.ledger.ends_at(CACHED, 1, before)
    book.acknowledge(CACHED, b"c2", first_offset=1)
    book.read(CACHED, b"c0", b"c2")
    book.ledger.ends_at(FLUSHED, 2, book.ledger.glance())
    book.acknowledge(FLUSHED, b"f2", first_offset=2)
    with pytest.raises(ViolationError, match=r"^L-1 "):
        book.ledger.ends_at(CACHED, 1, book.ledger.glance())
    with pytest.raises(ViolationError, match=r"^L-1 "):
        book.ledger.ends_at(FLUSHED, 1, book.ledger.glance())


def test_a_response_may_be_older_than_the_entries_of_the_ledger() -> None:
    book = Book()
    book.acknowledge(CACHED, b"c0", b"c1")
    book.power_losses += 1
    asked = book.ledger.glance()
    book.acknowledge(CACHED, b"c2")
    book.ledger.ends_at(CACHED, 0, asked)
    with pytest.raises(ViolationError, match=r"^L-1 "):
        book.ledger.ends_at(CACHED, 0, book.ledger.glance())


def test_records_that_were_read_after_a_power_loss_stay_when_an_earlier_loss_shows() -> None:
    """A reader that was beyond the records that a power loss took reads newer ones before anything shows the loss."""
    book = Book()
    book.acknowledge(CACHED, b"c0", b"c1", b"c2")
    book.power_losses += 1
    book.read(CACHED, b"c4", first_offset=1)
    book.acknowledge(CACHED, b"c3")
    book.read(CACHED, b"c3", b"c4")
    with pytest.raises(ViolationError, match=r"^L-1 "):
        book.read(CACHED, b"c5", first_offset=1)


def test_a_committed_reader_gets_all_of_a_transaction_or_nothing() -> None:
    transaction = Transaction()
    book = Book(transaction)
    book.acknowledge(FLUSHED, b"f0", b"f1")
    book.read(FLUSHED, b"", b"", committed=True)
    with pytest.raises(ViolationError, match=r"^L-3 "):
        book.read(FLUSHED, b"f0", b"", committed=True)
    transaction.may_be_committed = transaction.is_committed = True
    book.read(FLUSHED, b"f0", b"f1", committed=True)
    with pytest.raises(ViolationError, match=r"^L-1 "):
        book.read(FLUSHED, b"f0", b"", committed=True)


def test_a_run_without_a_disturbance_keeps_the_others() -> None:
    """Each disturbance has a random seed of its own, which makes shrinking possible."""
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
    """A user's own client, as docs/simulation.md describes it: it describes a group again and again."""

    def __init__(self, world: World) -> None:
        self._client = WatchingClient("watcher", world.scene)

    def start(self) -> None:
        self._client.ask()

    def settle(self) -> None:
        self._client.answers = 0

    def is_settled(self) -> bool:
        return self._client.answers > 0


class WatchingClient(SimulatedClient):
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
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(compile(code, "docs/simulation.md", "exec"), {"__name__": "example"})
    assert re.fullmatch(r"[0-9a-f]{64}\n", capsys.readouterr().out)


def test_a_slow_link_delays_messages_by_their_size() -> None:
    clock, network = network_of(1, drop=0.0, duplicate=0.0)
    answered: list[int] = []
    Receiver(network, answer=bytes(30))
    connection = network.connect("c", lambda data: answered.append(clock.now_ms - START_MS))
    network.slow_down("c", START_MS + 100_000, 1, reads_only=True)
    network.send(connection, bytes(50))
    while clock.step():
        pass
    network.slow_down("c", START_MS + 100_000, 1, reads_only=False)
    network.send(connection, bytes(50))
    while clock.step():
        pass
    reading, both = answered[0], answered[1] - answered[0]
    assert 30_000 < reading < 31_000
    assert 80_000 < both < 81_000


def test_the_users_own_clients_take_part() -> None:
    outcome = run(Setup(2, steps=500, make_clients=lambda world: [Watcher(world)]))
    assert not outcome.failure, report(outcome)
    assert outcome.trace_hash != run(Setup(2, steps=500)).trace_hash


def test_members_use_an_assignor_of_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process runs in real time. The run still depends on the setup alone."""
    (tmp_path / "assignor_of_simulation.py").write_text(ASSIGNOR.format(path=str(tmp_path / "groups")))
    monkeypatch.syspath_prepend(tmp_path)
    setup = Setup(3, steps=400, assignor="assignor_of_simulation:Turns")
    outcomes = [run(setup), run(setup)]
    assert not outcomes[0].failure, report(outcomes[0])
    assert outcomes[0].trace_hash == outcomes[1].trace_hash
    assert outcomes[0].transitions["group: consumer Assigning -> consumer Reconciling"] > 0
    assert "--assignor assignor_of_simulation:Turns" in report(outcomes[0])
    calls = (tmp_path / "groups").read_text().splitlines()
    assert len(calls) > 2
    assert calls[: len(calls) // 2] == calls[len(calls) // 2 :]


def loop_of(clock: VirtualClock, turn_ms: int = 0, clock_rate: float = 1.0) -> tuple[SimulatedLoop, list[str]]:
    errors: list[str] = []
    loop = SimulatedLoop(  # type: ignore[abstract]
        clock, clock_rate, turn_ms, lambda executor: (5, None), lambda message, error: errors.append(message)
    )
    return loop, errors


def run_all(clock: VirtualClock) -> None:
    while clock.step():
        pass


def test_the_loop_runs_coroutines_in_virtual_time() -> None:
    clock = VirtualClock()
    loop, errors = loop_of(clock, clock_rate=0.5)
    seen: list[tuple[str, int]] = []

    async def work() -> None:
        await asyncio.sleep(0.1)
        seen.append(("slept", clock.now_ms - START_MS))
        seen.append((await loop.run_in_executor(None, lambda: "worked"), clock.now_ms - START_MS))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await loop.create_future()
        seen.append(("gave up", clock.now_ms - START_MS))

    loop.enter(lambda: loop.create_task(work()))
    run_all(clock)
    # The clock of the process runs at half speed.
    assert seen == [("slept", 200), ("worked", 210), ("gave up", 2210)]
    assert not errors


def test_a_task_can_run_another_loop() -> None:
    clock = VirtualClock()
    (loop, errors), (other, other_errors) = loop_of(clock), loop_of(clock)
    seen: list[tuple[str, asyncio.AbstractEventLoop]] = []

    async def note(text: str) -> None:
        seen.append((text, asyncio.get_running_loop()))

    async def work() -> None:
        task = asyncio.current_task()
        other.enter(lambda: other.create_task(note("inside")))
        await note("after")
        assert asyncio.current_task() is task

    loop.enter(lambda: loop.create_task(work()))
    run_all(clock)
    assert seen == [("inside", other), ("after", loop)]
    assert errors == other_errors == []


def test_a_loop_runs_events_of_a_pause_afterwards_in_order() -> None:
    clock = VirtualClock()
    loop, _ = loop_of(clock)
    seen: list[str] = []
    loop.after(10, seen.append, "timer")
    loop.paused_until_ms = START_MS + 50
    clock.after(5, lambda: loop.enter(seen.append, "early"))
    clock.after(20, lambda: loop.enter(seen.append, "late"))
    clock.after(40, lambda: seen.append("still"))
    run_all(clock)
    assert seen == ["still", "early", "timer", "late"]


def test_a_loop_with_long_turns_runs_arrivals_of_one_turn_together() -> None:
    clock = VirtualClock()
    loop, _ = loop_of(clock, turn_ms=1)
    seen: list[tuple[str, int]] = []
    for name in ("one", "two"):
        clock.after(3, lambda name=name: loop.enter(lambda: seen.append((name, loop.turns))))  # type: ignore[misc]
    run_all(clock)
    assert seen == [("one", 1), ("two", 1)]


class Noting(asyncio.Protocol):
    """One end of a connection between processes. It notes what it receives and sends nothing."""

    def __init__(self) -> None:
        self.received: list[bytes] = []
        self.is_lost = False
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.received.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_lost = True


def test_bytes_between_processes_stay_in_order_until_one_process_ends() -> None:
    clock = VirtualClock()
    random = Random(1)
    sockets = UnixSockets(clock, lambda: random.randint(0, 50))
    (near, _), (far, _) = loop_of(clock), loop_of(clock)
    near.sockets = far.sockets = sockets
    client, server = Noting(), Noting()
    refused: list[OSError] = []

    async def connect() -> None:
        try:
            await near.create_unix_connection(lambda: client, "away")
        except ConnectionRefusedError as error:
            refused.append(error)
        await far.create_unix_server(lambda: server, sock="here")
        await near.create_unix_connection(lambda: client, "here")

    near.enter(lambda: near.create_task(connect()))
    run_all(clock)
    assert len(refused) == 1
    assert client.transport is not None
    for number in range(20):
        client.transport.write(bytes([number]))
    run_all(clock)
    assert server.received == [bytes([number]) for number in range(20)]
    near.end()
    run_all(clock)
    assert (server.is_lost, client.is_lost, sockets.ends) == (True, False, [])
    far.end()
    assert not sockets.servers


def test_a_loop_that_has_ended_runs_nothing() -> None:
    clock = VirtualClock()
    loop, errors = loop_of(clock)
    seen: list[str] = []
    loop.call_later(0.01, seen.append, "later")
    loop.has_ended = True
    loop.enter(seen.append, "now")
    loop.call_exception_handler({"message": "lost"})
    run_all(clock)
    assert seen == errors == []


def test_an_exception_that_is_never_retrieved_is_reported() -> None:
    clock = VirtualClock()
    loop, errors = loop_of(clock)
    loop.create_future().set_exception(ValueError())
    assert errors == ["Future exception was never retrieved"]


def test_a_log_whose_close_fails_is_written_again_when_it_is_opened() -> None:
    """A failed sync may lose dirty pages although reads still return them, and no later sync writes them (D-3)."""
    world = World(Setup(1, faults=frozenset()))
    broker = world.broker
    with world.surroundings():
        world.controller.begin([], broker.start)
        run_some(world, 100)
        process = broker.process
        assert process is not None
        logs = process.folder.coordinator_logs[TOPICS["groups"]]
        log = logs.open(0)
        path = f"{log.directory}/00000000000000000000.log"
        batch = encode_batch([Record(b"key", b"value", timestamp_ms=START_MS)], base_offset=log.end_offset)
        log.append(batch, now_ms=START_MS)

        def fails_to_sync(operation: Operation) -> BaseException | None:
            return OSError(5, "simulated") if (operation.kind, operation.path) == ("datasync", path) else None

        broker.disk.fault = fails_to_sync
        logs.close(0)
        broker.disk.fault = no_fault
        assert logs.open(0).end_offset == 1
        broker.disk.crash(keep_nothing)
    file = broker.disk.open_read(path)
    assert file.read_at(0, file.size()) == batch


def run_some(world: World, steps: int) -> None:
    for _ in range(steps):
        world.clock.step()
