# SPDX-License-Identifier: Apache-2.0
"""The network between instances and the upstream: connections that keep order and fail as a whole, as TCP's do.

The instance's end of a connection is an asyncio transport, so the instance uses its own client code. The broker handles
one request of a connection at a time, as Apache Kafka does.

Faults: a message is lost, and the connection with it; a request is held up, often for longer than its sender waits for
the response or owns its shards; an instance is cut off in one or both directions; all its connections are reset.
Requests that were sent may still arrive when their connection or their process has ended.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from random import Random
from types import CoroutineType

from kcoord.simulation.clock import VirtualClock
from kcoord.simulation.loop import NewProtocol, SimulatedLoop, running
from kcoord.simulation.trace import Trace
from kcoord.simulation.upstream.brokers import BROKERS, UpstreamBrokers, host_of
from kcoord.simulation.upstream.meaning import writer_of
from kcoord.simulation.upstream.options import LONGEST_HOLD_UP_MS, UpstreamOptions
from kcoord_protocol.api_keys import ApiKey, request_class
from kcoord_protocol.framing import FrameReader, decode_request_header, encode_response
from kcoord_protocol.messages import Message, ProduceRequest
from kcoord_protocol.record_batch import decode_header

_BROKER_OF = {host_of(broker_id): broker_id for broker_id in BROKERS}
_MOST_FRAME_BYTES = 1 << 24
_MOST_CLOSES = 5


@dataclass
class CutOff:
    """Until when an instance is cut off from the upstream, and in which directions."""

    until_ms: int = 0
    requests: bool = False
    responses: bool = False


@dataclass
class LastWords:
    """A Produce request that is held up, and after which its process ends (`die`).

    `until_next_transaction`: the request arrives when its client has begun another transaction under another owner, if
    that is earlier.
    """

    in_transaction: bool
    hold_up_ms: int
    die: Callable[[], None]
    until_next_transaction: bool = False


class UpstreamNetwork:
    """Connects instances with the brokers. The module docstring describes the faults."""

    def __init__(
        self, clock: VirtualClock, random: Random, options: UpstreamOptions, trace: Trace, brokers: UpstreamBrokers
    ) -> None:
        self.faults_on = True
        self.clock = clock
        self.trace = trace
        self.brokers = brokers
        self._random = random
        self._options = options
        self._cut_off: dict[int, CutOff] = {}
        self._last_words: dict[int, LastWords] = {}
        self.open: list[BrokerLink] = []

    async def connect(
        self, loop: SimulatedLoop, node_id: int, new_protocol: NewProtocol, host: str
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        """Opens a connection of an instance to a broker."""
        await asyncio.sleep(self.way_ms() / 1000)
        if self.is_cut(node_id, is_request=True) or self.is_cut(node_id, is_request=False):
            # The packets are lost. The caller gives up at its timeout.
            await loop.create_future()
        link = BrokerLink(self, loop, node_id, _BROKER_OF[host])
        self.open.append(link)
        link.protocol = new_protocol()
        link.protocol.connection_made(link)
        return link, link.protocol

    def cut_off(self, node_id: int, random: Random, longest_ms: int) -> None:
        """Loses the requests of an instance, the responses to it, or both, for a while. Neither side is notified."""
        requests, responses = random.choice(((True, False), (False, True), (True, True)))
        until_ms = self.clock.now_ms + random.randint(1, longest_ms)
        self._cut_off[node_id] = CutOff(until_ms, requests, responses)
        self.trace.add("cut-off", f"{node_id} {requests} {responses} {until_ms}")

    def is_cut(self, node_id: int, *, is_request: bool) -> bool:
        cut = self._cut_off.get(node_id)
        if cut is None or not self.faults_on or self.clock.now_ms >= cut.until_ms:
            return False
        return cut.requests if is_request else cut.responses

    def hear_last_words(self, node_id: int, words: LastWords) -> None:
        """Holds up the next Produce request of an instance, and ends its process. Then the request is a zombie's."""
        self._last_words[node_id] = words

    def last_words_ms(self, node_id: int, frame: bytes, arrive: Callable[[], None]) -> int:
        """Returns for how long a request is held up because its process has to end now, 0 if it does not."""
        words = self._last_words.get(node_id)
        if words is None or not self.faults_on or int.from_bytes(frame[:2]) != ApiKey.PRODUCE:
            return 0
        header, position = decode_request_header(frame)
        request = ProduceRequest.decode(frame[position:], header.request_api_version)
        if words.in_transaction and request.transactional_id is None:
            return 0
        del self._last_words[node_id]
        self.trace.add("last-words", f"{node_id} {words.hold_up_ms}")
        self.clock.after(0, words.die)
        if words.until_next_transaction and request.transactional_id is not None:
            self._arrive_in_next_transaction(request, arrive)
        return words.hold_up_ms

    def _arrive_in_next_transaction(self, request: ProduceRequest, arrive: Callable[[], None]) -> None:
        (data,) = request.topic_data[0].partition_data
        records, partition = bytes(data.records or b""), self.brokers.partitions[data.index]
        claim, _ = writer_of(records)

        def arrive_under_another_owner() -> bool:
            if partition.owner == claim:
                return False
            self.clock.after(1, arrive)
            return True

        producer_id = decode_header(records).producer_id
        self.brokers.transactions.when_next_begins(producer_id, arrive_under_another_owner)

    def reset(self, node_id: int) -> None:
        """Ends all connections of an instance."""
        self.trace.add("reset", str(node_id))
        for link in self.open[:]:
            if link.node_id == node_id:
                link.reset()

    def way_ms(self) -> int:
        return self._random.randint(1, self._options.delay_ms) if self.faults_on else 1

    def hold_up_ms(self, link: BrokerLink) -> int:
        """Draws the time for which a request is held up, mostly 0."""
        if not self.faults_on or self._random.random() >= self._options.hold_up:
            return 0
        self.trace.add("hold-up", f"{link.node_id}")
        return self._random.randint(0, LONGEST_HOLD_UP_MS)

    def loses(self, link: BrokerLink) -> bool:
        if not self.faults_on or self._random.random() >= self._options.loss:
            return False
        self.trace.add("drop", f"{link.node_id}")
        return True


class BrokerLink(asyncio.Transport):
    """The instance's end of a connection to a broker. `protocol` is set when it is opened."""

    protocol: asyncio.Protocol

    def __init__(self, network: UpstreamNetwork, loop: SimulatedLoop, node_id: int, broker_id: int) -> None:
        super().__init__()
        self.node_id = node_id
        self._network = network
        self._loop = loop
        self._broker_id = broker_id
        self._reader = FrameReader(_MOST_FRAME_BYTES)
        self._is_closed = False
        self.is_lost = False
        """True if nothing passes any more, without notice to either side."""
        self._arrival_ms = self._return_ms = 0
        self._queue: deque[bytes] = deque()
        """Requests that have arrived at the broker. The first one is being handled."""

    # The interface of an asyncio transport.

    def write(self, data: bytes | bytearray | memoryview) -> None:
        for frame in self._reader.feed(bytes(data)):
            self._send(bytes(frame))

    def is_closing(self) -> bool:
        return self._is_closed

    def abort(self) -> None:
        self.close()

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            self._forget()
            self._loop.call_soon(self.protocol.connection_lost, None)

    def reset(self) -> None:
        """Ends the connection from outside. The instance is notified."""
        self._forget()
        if not self._is_closed:
            self._loop.enter(self.close)

    def _forget(self) -> None:
        if self in self._network.open:
            self._network.open.remove(self)

    # Messages.

    def _send(self, frame: bytes) -> None:
        network = self._network
        if self._is_closed or self.is_lost:
            return
        if network.is_cut(self.node_id, is_request=True):
            self.is_lost = True
            return
        if network.loses(self):
            self.reset()
            return
        has_arrived = False

        def arrive() -> None:
            nonlocal has_arrived
            if not has_arrived:
                has_arrived = True
                self._arrive(frame)

        held_up_ms = network.last_words_ms(self.node_id, frame, arrive) or network.hold_up_ms(self)
        arrival_ms = network.clock.now_ms + network.way_ms() + held_up_ms
        self._arrival_ms = max(self._arrival_ms, arrival_ms)
        network.clock.at(self._arrival_ms, arrive)

    def _arrive(self, frame: bytes) -> None:
        self._queue.append(frame)
        if len(self._queue) == 1:
            self._handle_next()

    def _handle_next(self) -> None:
        header, position = decode_request_header(self._queue[0])
        api_key, version = header.request_api_key, header.request_api_version
        request = request_class(api_key).decode(self._queue[0][position:], version)
        if api_key not in (ApiKey.FETCH, ApiKey.METADATA, ApiKey.API_VERSIONS):
            self._network.trace.add("upstream-request", f"{self.node_id} {ApiKey(api_key).name}")
        is_first = True

        def respond(response: Message) -> None:
            nonlocal is_first
            if is_first:
                is_first = False
                self._respond(encode_response(header.correlation_id, api_key, version, response.encode(version)))

        self._network.brokers.handle(self._broker_id, self.node_id, request, respond)

    def _respond(self, frame: bytes) -> None:
        network = self._network
        self._queue.popleft()
        if self._queue:
            network.clock.after(0, self._handle_next)
        if self._is_closed or self.is_lost:
            return
        if network.is_cut(self.node_id, is_request=False):
            self.is_lost = True
            return
        if network.loses(self):
            self.reset()
            return
        self._return_ms = max(self._return_ms, network.clock.now_ms + network.way_ms())
        network.clock.at(self._return_ms, lambda: self._loop.enter(self._receive, frame))

    def _receive(self, frame: bytes) -> None:
        if not self._is_closed:
            self.protocol.data_received(frame)


class InstanceLoop(SimulatedLoop):
    """The event loop of an instance, which opens connections to the upstream."""

    network: UpstreamNetwork
    node_id: int

    async def create_connection(  # type: ignore[override]
        self, protocol_factory: NewProtocol, host: str, port: int, *, ssl: object = None
    ) -> tuple[asyncio.Transport, asyncio.Protocol]:
        return await self.network.connect(self, self.node_id, protocol_factory, host)

    def close_tasks(self) -> None:
        """Closes what still waits in a process that has ended. Otherwise Python does so some day, and complains."""
        with running(self):
            for task in asyncio.all_tasks(self):
                coroutine = task.get_coro()
                for _ in range(_MOST_CLOSES):
                    # A coroutine that awaits something else while it is closed has to be closed again.
                    with suppress(RuntimeError):
                        if isinstance(coroutine, CoroutineType):
                            coroutine.close()
