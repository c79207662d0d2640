# SPDX-License-Identifier: Apache-2.0
"""The Kafka stage: a broker of Apache Kafka, over sockets.

Answers are compared after `MASKS` have removed the parts that differ by necessity. Several transcripts share a broker,
so their groups and transactional ids have a prefix, and their topics are deleted at the end. Time is real here: a
request without a response within `WAITS_SECONDS` counts as waiting.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any, Final

from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.api_keys import response_class
from kcoord_protocol.framing import decode_response_header, encode_request
from kcoord_protocol.messages import ListGroupsResponse, ListTransactionsResponse, Message
from tests.transcripts.frame_stage import FrameStage
from tests.transcripts.names import Names
from tests.transcripts.stage import Sent

WAITS_SECONDS: Final = 0.5
ANSWER_SECONDS: Final = 15.0
SETTLE_SECONDS: Final = 0.15
_MAY_WAIT: Final = ("JoinGroup", "SyncGroup")


def _without_parts(*names: str) -> Callable[[list[str]], list[str]]:
    """Returns a mask that removes `name: value` from each line."""
    pattern = re.compile(rf'(?:(?<=^)|(?<=[ (])|(?<=: ))(?:{"|".join(names)}): (?:"[^"]*"|\S+)(?:  |$)')

    def mask(lines: list[str]) -> list[str]:
        return [pattern.sub("", line).rstrip() for line in lines]

    return mask


def _substitute(pattern: str, by: str) -> Callable[[list[str]], list[str]]:
    compiled = re.compile(pattern)
    return lambda lines: [compiled.sub(by, line) for line in lines]


def _without_lines(pattern: str) -> Callable[[list[str]], list[str]]:
    compiled = re.compile(pattern)
    return lambda lines: [line for line in lines if not compiled.fullmatch(line)]


def _sort_records(lines: list[str]) -> list[str]:
    """Sorts the records, since Kafka writes the records of several members in the order of a hash map."""
    records = [line for line in lines if line.startswith("record ")]
    return [line for line in lines if not line.startswith("record ")] + sorted(records)


MASKS: Final[dict[str, Callable[[list[str]], list[str]]]] = {
    "only the core stage shows timers": _without_lines("timer .*"),
    "error texts differ between brokers": _without_parts("errorMessage"),
    "creation times and reasons are kcoord's fields": _without_parts(
        "creationTimeMs", "groupCreationTimeMs", "epochReason", "emptySince"
    ),
    "reasons of tombstones are kcoord's headers": _substitute(r"tombstone \(.*\)", "tombstone"),
    "Kafka's log has a record for each classic group that has had no generation yet": _without_lines(
        r"record GroupMetadata \S+ v\d: (protocolType: consumer  )?currentStateTimestamp: \+\d+"
    ),
    "Kafka deletes partition metadata, which no release since 4.1 writes": _without_lines(
        "record ConsumerGroupPartitionMetadata .*: tombstone"
    ),
    "Kafka's records of transactional offsets have no topic id": _substitute(
        r"^(record \[.*\] OffsetCommit .*)  topicId: \S+$", r"\1"
    ),
    "times": _substitute(r": \+\d+", ": +*"),
    "order of records": _sort_records,
}
"""The reason of a difference -> the function that removes it from the lines of both sides."""


class KafkaClient:
    """One connection. Kafka reads a request after it has answered the last request."""

    def __init__(self, client_id: str) -> None:
        self._client_id = client_id
        self._sent: list[Sent] = []
        self._count = 0
        self._task: asyncio.Task[None] | None = None

    async def connect(self, port: int) -> None:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        self._task = asyncio.create_task(self._read())

    def send(self, sent: Sent) -> None:
        request = sent.request
        self._count += 1
        self._sent.append(sent)
        body = request.message.encode(request.version)
        self._writer.write(encode_request(request.message.api_key, request.version, self._count, self._client_id, body))

    async def _read(self) -> None:
        while True:
            try:
                size = int.from_bytes(await self._reader.readexactly(4), "big")
                frame = await self._reader.readexactly(size)
            except (asyncio.IncompleteReadError, ConnectionError):
                return
            sent = self._sent.pop(0)
            key, version = sent.request.message.api_key, sent.request.version
            _, offset = decode_response_header(frame, key, version)
            sent.answer = response_class(key).decode(frame[offset:], version)

    @property
    def is_closed(self) -> bool:
        """True if the broker has closed the connection."""
        return self._task is None or self._task.done()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
        self._writer.close()


class KafkaStage(FrameStage):
    """A running Apache Kafka on a port of this machine."""

    name = "kafka"

    def __init__(self, names: Names, port: int) -> None:
        super().__init__(names)
        self._port = port
        self._clients: dict[str, KafkaClient] = {}
        self._topics: list[str] = []

    async def open(self, settings: dict[str, str]) -> None:
        """Prepares the broker, which runs already with these settings."""
        self.start_ms = int(time.time() * 1000)
        await self._open_logs()

    async def close(self) -> None:
        for topic in list(self._topics):
            await self.delete_topic(topic)
        for client in self._clients.values():
            await client.close()

    async def restart(self) -> None:
        raise NotImplementedError("several transcripts share the broker, so it cannot be restarted")

    async def send(self, sent: Sent) -> None:
        name = sent.request.client
        if name not in self._clients:
            self._clients[name] = KafkaClient(name)
            await self._clients[name].connect(self._port)
        self._clients[name].send(sent)
        seconds = WAITS_SECONDS if sent.request.api in _MAY_WAIT else ANSWER_SECONDS
        end = time.monotonic() + seconds
        while sent.answer is None and time.monotonic() < end:
            assert not self._clients[name].is_closed, f"Kafka has closed the connection: {sent.request}"
            await asyncio.sleep(0.005)
        if isinstance(sent.answer, ListGroupsResponse):
            prefix = self.names.prefix
            sent.answer.groups = [group for group in sent.answer.groups if group.group_id.startswith(prefix)]
        elif isinstance(sent.answer, ListTransactionsResponse):
            sent.answer.transaction_states = [
                state
                for state in sent.answer.transaction_states
                if state.transactional_id.startswith(self.names.prefix)
            ]

    async def request(self, message: Message, version: int) -> Any:
        return await self._exchange(message, version)

    async def settle(self) -> None:
        await asyncio.sleep(SETTLE_SECONDS)

    async def set_topic(self, name: str, partitions: int) -> bytes:
        topic_id = await super().set_topic(name, partitions)
        if name not in self._topics:
            self._topics.append(name)
        await self.settle()
        return topic_id

    async def delete_topic(self, name: str) -> None:
        await super().delete_topic(name)
        self._topics.remove(name)
        await self.settle()

    async def sleep(self, milliseconds: int) -> list[str]:
        await asyncio.sleep(milliseconds / 1000)
        return []

    async def take_records(self) -> list[CoordinatorRecord]:
        """Returns the records of this transcript. The broker may also have removed groups of earlier transcripts."""
        return [record for record in await super().take_records() if self._is_own(record)]

    def _is_own(self, record: CoordinatorRecord) -> bool:
        owners = (getattr(record.key, name, None) for name in ("group_id", "group", "transactional_id"))
        owner = next((owner for owner in owners if owner is not None), None)
        return not owner or owner.startswith(self.names.prefix)

    def mask(self, lines: list[str]) -> list[str]:
        for mask in MASKS.values():
            lines = mask(lines)
        return [line for line in lines if line] or ["ok"]
