# SPDX-License-Identifier: Apache-2.0
"""The simulation stage: a broker process on simulated time, disk and network, without faults and delays.

Its observer checks every response and every record against the invariants of the simulation.
"""

from __future__ import annotations

from random import Random
from typing import Any, Final

from kcoord.config import BrokerConfig
from kcoord.metadata.image import GROUP_RESOURCE
from kcoord.simulation.broker import SimulatedBroker
from kcoord.simulation.clock import VirtualClock
from kcoord.simulation.controller import Controller
from kcoord.simulation.network import Network, SimulatedConnection
from kcoord.simulation.options import Options
from kcoord.simulation.planted import NO_FAULT
from kcoord.simulation.process import DATA_FOLDER
from kcoord.simulation.surroundings import around
from kcoord.simulation.trace import Trace
from kcoord_protocol.api_keys import response_class
from kcoord_protocol.framing import FrameReader, decode_response_header, encode_request
from kcoord_protocol.messages import ConfigRecord, Message, PartitionRecord, RemoveTopicRecord, TopicRecord
from tests.transcripts.frame_stage import FrameStage
from tests.transcripts.names import Names
from tests.transcripts.path_client import MOST_BYTES
from tests.transcripts.stage import TOPIC_MS, Sent, config_of

START_MS: Final = 1_700_000_000_000
_QUIET_ROUNDS: Final = 3
_MOST_STEPS: Final = 100_000


def _calm_options(config: BrokerConfig) -> Options:
    """Returns options for a world without random events and without delays."""
    options = Options.draw(Random(0), "", frozenset())
    options.shards = config.offsets_topic_num_partitions
    options.transaction_shards = config.transaction_state_log_num_partitions
    options.heartbeat_interval_ms = config.group_consumer_heartbeat_interval_ms
    options.inline_ms = config.kcoord_assignor_inline_ms
    options.network_delay_ms = options.disk_delay_ms = options.turn_ms = options.hop_ms = 0
    options.drop_probability = options.duplicate_probability = options.delay_probability = 0.0
    options.disk_error_probability = 0.0
    options.snapshot_bytes = 0
    options.has_foreign_shards = False
    return options


class NoChance(Random):
    """A random source that chooses the shortest delay and no random event."""

    def randint(self, a: int, b: int) -> int:
        return 0

    def random(self) -> float:
        return 0.999_999


class SimulationClient:
    """One connection through the simulated network."""

    def __init__(self, network: Network, client_id: str) -> None:
        self._network = network
        self._client_id = client_id
        self._connection: SimulatedConnection = network.connect(client_id, self._on_data)
        self._frames = FrameReader(MOST_BYTES, MOST_BYTES)
        self._sent: list[Sent] = []
        self._count = 0

    def send(self, sent: Sent) -> None:
        request = sent.request
        self._count += 1
        self._sent.append(sent)
        body = request.message.encode(request.version)
        data = encode_request(request.message.api_key, request.version, self._count, self._client_id, body)
        self._network.send(self._connection, data)

    def _on_data(self, data: bytes) -> None:
        for frame in self._frames.feed(data):
            sent = self._sent.pop(0)
            key, version = sent.request.message.api_key, sent.request.version
            _, offset = decode_response_header(frame, key, version)
            sent.answer = response_class(key).decode(frame[offset:], version)


class SimulationStage(FrameStage):
    """The broker of the simulation, with one connection per client."""

    name = "simulation"
    start_ms = START_MS

    def __init__(self, names: Names) -> None:
        super().__init__(names)
        self._topic_count = 0

    async def open(self, settings: dict[str, str]) -> None:
        config = config_of(settings)
        options = _calm_options(config)
        self._clock = VirtualClock()
        self._clock.now_ms = START_MS
        trace = Trace(self._clock)
        network = self._network = Network(self._clock, NoChance(0), options, trace)
        self._broker = SimulatedBroker(self._clock, NoChance(0), options, trace, network, NO_FAULT)
        own = {"node.id": "1", "log.dirs": DATA_FOLDER, "listeners": "PLAINTEXT://broker:9092"}
        self._broker.config = config_of(settings | own)
        self._around = around(options, trace, self._broker.observer)
        self._around.__enter__()
        self._controller = Controller(self._broker, NoChance(0), trace)
        self._clients: dict[str, SimulationClient] = {}
        self._controller.begin([], lambda: self._clock.after(0, self._broker.start))
        await self.settle()
        await self._open_logs()

    async def close(self) -> None:
        self._around.__exit__(None, None, None)

    async def restart(self) -> None:
        self._broker.crash(whole_machine=False)
        self._clients.clear()
        self._broker.start()
        await self.settle()

    async def send(self, sent: Sent) -> None:
        name = sent.request.client
        if name not in self._clients:
            self._clients[name] = SimulationClient(self._network, name)
        self._clients[name].send(sent)

    async def request(self, message: Message, version: int) -> Any:
        return await self._exchange(message, version)

    async def settle(self) -> None:
        """Runs everything that is due now, and everything that follows without a delay."""
        quiet = 0
        while quiet < _QUIET_ROUNDS:
            quiet = quiet + 1 if self._step_until(0) == 1 else 0

    def _step_until(self, delay_ms: int) -> int:
        """Steps the clock until the delay is over. Returns the number of steps."""
        over: list[bool] = []
        self._clock.after(delay_ms, lambda: over.append(True))
        for steps in range(1, _MOST_STEPS):
            self._clock.step()
            if over:
                return steps
        raise AssertionError(f"the delay of {delay_ms} ms is not over after {_MOST_STEPS} steps")

    async def sleep(self, milliseconds: int) -> list[str]:
        self._step_until(milliseconds)
        await self.settle()
        return []

    # The controller of the simulation writes topics and configs.

    async def set_topic(self, name: str, partitions: int) -> bytes:
        topic = self._broker.image.topics.get(name)
        records: list[Message] = []
        if topic is None:
            self._topic_count += 1
            topic_id = self._topic_count.to_bytes(16, "big")
            records.append(TopicRecord(name=name, topic_id=topic_id))
        else:
            topic_id = topic.id
        records += [
            PartitionRecord(
                partition_id=number,
                topic_id=topic_id,
                replicas=[1],
                isr=[1],
                leader=1,
                creation_time_ms=self._clock.now_ms,
            )
            for number in range(len(topic.partitions) if topic is not None else 0, partitions)
        ]
        self._controller.write(records)
        await self.settle()
        await self.sleep(TOPIC_MS)
        return topic_id

    async def delete_topic(self, name: str) -> None:
        topic = self._broker.image.topics[name]
        self._controller.write([RemoveTopicRecord(topic_id=topic.id)])
        await self.settle()

    async def set_group_config(self, group: str, configs: dict[str, str | None]) -> None:
        self._controller.write(
            [
                ConfigRecord(resource_type=GROUP_RESOURCE, resource_name=group, name=key, value=value)
                for key, value in configs.items()
            ]
        )
        await self.settle()

    def mask(self, lines: list[str]) -> list[str]:
        """Removes the timers, which only the core stage shows, and replaces the address of clients."""
        return [line.replace("/10.0.0.1", "/127.0.0.1") for line in lines if not line.startswith("timer ")] or ["ok"]
