# SPDX-License-Identifier: Apache-2.0
"""Plays transcripts: a `Stage` passes the commands to a coordinator, and `play` returns its answers.

A stage has topics, a clock and a log, and it serves requests. After each command the new records of the log are part of
the answer. These commands are no requests:

    topic foo partitions=4          creates a topic, or adds partitions to it
    delete topic foo                deletes a topic
    config group g KEY=VALUE        sets a dynamic config of a group, or removes it if the value is empty
    sleep 45000                     passes time, in ms or with a unit: 45s, 10m, 7h, 7d
    restart                         restarts the coordinator, which keeps only its log
"""

from __future__ import annotations

import abc
import re
from dataclasses import dataclass
from typing import Final

from kcoord.config import BrokerConfig
from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.messages import Message
from tests.transcripts.answers import Printer
from tests.transcripts.names import Names
from tests.transcripts.requests import CommandError, Request, parse_request
from tests.transcripts.transcript import Command, Transcript

SETTINGS: Final = {
    "auto.create.topics.enable": "false",
    "kcoord.release": "4.3",
    "group.consumer.assignment.interval.ms": "0",
    "group.consumer.min.assignment.interval.ms": "0",
    "group.consumer.min.session.timeout.ms": "500",
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "500",
    "offsets.topic.num.partitions": "4",
    "offsets.topic.replication.factor": "1",
    "transaction.state.log.num.partitions": "2",
}
"""The settings on all stages that differ from the defaults of a broker. A transcript can override them."""
TOPIC_MS: Final = 10
"""The time that passes after a topic is created, so groups are newer than their topics (KIP-1327)."""
_UNITS: Final = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}


@dataclass(slots=True)
class Sent:
    """A request that was sent, and its response, which is None until it has come."""

    request: Request
    answer: Message | None = None
    is_shown: bool = False


class Stage(abc.ABC):
    """A broker, or a part of it, on which one transcript is played."""

    name: str
    start_ms: int
    """The moment to which the times in the transcript are relative."""

    def __init__(self, names: Names) -> None:
        self.names = names

    @abc.abstractmethod
    async def open(self, settings: dict[str, str]) -> None: ...

    @abc.abstractmethod
    async def close(self) -> None: ...

    @abc.abstractmethod
    async def send(self, sent: Sent) -> None:
        """Sends a request. When this method returns, the response is set, unless it waits for a request or a timer."""

    @abc.abstractmethod
    async def settle(self) -> None:
        """Waits for the effects of requests: writes, background tasks, responses to earlier requests."""

    @abc.abstractmethod
    async def set_topic(self, name: str, partitions: int) -> bytes:
        """Creates a topic, or adds partitions to it. Returns its id."""

    @abc.abstractmethod
    async def delete_topic(self, name: str) -> None: ...

    @abc.abstractmethod
    async def set_group_config(self, group: str, configs: dict[str, str | None]) -> None: ...

    @abc.abstractmethod
    async def sleep(self, milliseconds: int) -> list[str]:
        """Passes time. Returns the timers that fired, if the stage can see them."""

    @abc.abstractmethod
    async def restart(self) -> None: ...

    @abc.abstractmethod
    async def take_records(self) -> list[CoordinatorRecord]:
        """Returns the records that were written since the last call."""

    def mask(self, lines: list[str]) -> list[str]:
        """Returns the lines without the parts that differ on this stage by necessity."""
        return lines


class Player:
    """Sends the commands of one transcript to a stage, one by one."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._printer = Printer(stage.names, stage.start_ms)
        self._waiting: list[Sent] = []

    async def play(self, command: Command) -> list[str]:
        """Runs a command and returns the lines of its answer."""
        lines = await self._run(command.text)
        await self._stage.settle()
        answered = [sent for sent in self._waiting if sent.answer is not None]
        for sent in answered:
            self._learn(sent)
        for sent in answered:
            self._waiting.remove(sent)
            first, *rest = self._show(sent)
            lines += [f"answer of {sent.request.client}: {first}", *rest]
        lines += self._printer.records(await self._stage.take_records())
        return lines or ["ok"]

    async def _run(self, text: str) -> list[str]:
        stage = self._stage
        if match := re.fullmatch(r"topic (\S+) partitions=(\d+)", text):
            stage.names.add_topic(match[1], await stage.set_topic(match[1], int(match[2])))
        elif match := re.fullmatch(r"delete topic (\S+)", text):
            await stage.delete_topic(match[1])
        elif match := re.fullmatch(r"config group (\S+) (.+)", text):
            pairs = [part.partition("=") for part in match[2].split()]
            configs = {key: value or None for key, _, value in pairs}
            await stage.set_group_config(stage.names.prefix + match[1], configs)
        elif match := re.fullmatch(r"sleep (\d+)(\w*)", text):
            fired = await stage.sleep(int(match[1]) * _UNITS[match[2]])
            return [f"timer {stage.names.shown(timer)}" for timer in fired]
        elif text == "restart":
            self._waiting.clear()
            await stage.restart()
        else:
            return await self._request(text)
        return []

    async def _request(self, text: str) -> list[str]:
        sent = Sent(parse_request(text, self._stage.names))
        await self._stage.send(sent)
        await self._stage.settle()
        if sent.answer is None:
            self._waiting.append(sent)
            return ["waits"]
        self._learn(sent)
        return self._show(sent)

    def _learn(self, sent: Sent) -> None:
        """Names the new ids in a response."""
        names = self._stage.names
        owner = getattr(sent.request.message, "group_instance_id", None) or sent.request.client
        names.learn_member(getattr(sent.answer, "member_id", None) or "", owner)
        names.learn_producer(getattr(sent.answer, "producer_id", -1))

    def _show(self, sent: Sent) -> list[str]:
        assert sent.answer is not None
        return self._printer.response(sent.answer)


async def play(transcript: Transcript, stage: Stage) -> list[list[str]]:
    """Plays a transcript. Returns the answers to all commands."""
    await stage.open(SETTINGS | transcript.settings)
    try:
        player = Player(stage)
        answers = []
        for command in transcript.commands:
            try:
                answers.append(await player.play(command))
            except CommandError as error:
                raise CommandError(f"{transcript.path}:{command.line}: {error}") from None
        return answers
    finally:
        await stage.close()


def config_of(settings: dict[str, str]) -> BrokerConfig:
    """Returns the configuration of kcoord, without keys that only Kafka has."""
    unknown = BrokerConfig.from_properties(settings).unknown
    return BrokerConfig.from_properties({key: value for key, value in settings.items() if key not in unknown})
