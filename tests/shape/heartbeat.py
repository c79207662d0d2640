# SPDX-License-Identifier: Apache-2.0
"""The files that a joining ConsumerGroupHeartbeat passes.

A broker runs in this process, in the main thread, with its default settings. A client in another thread joins new
groups through a socket. A profiler hook records the Python functions of `kcoord` and `kcoord_protocol` that are entered
between `data_received` and the write of the response. It records the thread of the event loop and every thread that the
broker has started. Imports do not count, because a first join, which is not recorded, makes them. A file counts only if
every recorded join enters it, so periodic tasks do not count.

A call counts for the file that has the code of the function. The codecs of messages are compiled from strings and count
for `kcoord_protocol/message.py`, which compiles them. Methods that `dataclass` generates are in no file and do not
count.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Final
from unittest import mock

import uvloop

from kcoord.config import BrokerConfig
from kcoord.server.process import ReadyLine
from kcoord.server.start import run
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    Message,
)
from tests.integration.wire import WireClient
from tests.shape.source import PACKAGES

JOINS: Final = 5
TOPIC: Final = "topic"
CODECS: Final = "kcoord_protocol/message.py"

_READY_SECONDS: Final = 30.0
_COMPREHENSIONS: Final = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>", "<module>")
_TRANSPORT_FILE: Final = "selector_events.py"


@dataclass(slots=True)
class Way:
    """The functions that one request entered, by file."""

    functions: dict[str, set[str]] = field(default_factory=dict)

    @property
    def function_count(self) -> int:
        return sum(len(names) for names in self.functions.values())

    def intersection(self, other: Way) -> Way:
        common = self.functions.keys() & other.functions.keys()
        return Way({file: self.functions[file] & other.functions[file] for file in common})


class Recorder:
    """The profiler hook. `arm` makes it record the next request; `way` is complete when `done` is set."""

    def __init__(self) -> None:
        self.done = threading.Event()
        self.way = Way()
        self._is_armed = False
        self._is_recording = False
        self._files: dict[CodeType, str] = {}

    def arm(self) -> None:
        """Makes the recorder record the next request."""
        self.done.clear()
        self.way = Way()
        self._is_armed = True

    def on_event(self, frame: FrameType, event: str, argument: object) -> None:
        """The profiler hook: called by the interpreter for each call of a function."""
        if event != "call" or not self._is_armed:
            return
        code = frame.f_code
        if code.co_name == "write" and code.co_filename.endswith(_TRANSPORT_FILE):
            if self._is_recording:
                self._is_armed = self._is_recording = False
                self.done.set()
            return
        file = self._file(code)
        if not file:
            return
        if code.co_name == "data_received":
            self._is_recording = True
        if self._is_recording and code.co_name not in _COMPREHENSIONS:
            self.way.functions.setdefault(file, set()).add(code.co_qualname)

    def _file(self, code: CodeType) -> str:
        """Returns the path of the file, relative to the parent of its package; empty for files of other packages."""
        file = self._files.get(code)
        if file is None:
            file = self._files[code] = _file_of(code.co_filename)
        return file


def _file_of(name: str) -> str:
    if name.startswith("<") and name.endswith((" decoder>", " encoder>", " constructor>")):
        return CODECS
    for package, folder in PACKAGES.items():
        if Path(name).is_relative_to(folder):
            return str(Path(package, Path(name).relative_to(folder)))
    return ""


def joining_heartbeat() -> Way:
    """Starts a broker, joins new groups, and returns the functions that every join entered."""
    recorder = Recorder()
    ways: list[Way] = []
    failures: list[BaseException] = []

    def join(ready: ReadyLine) -> None:
        # The functions of the client do not count.
        sys.setprofile(None)
        try:
            ways.extend(_join_groups(int(ready.addresses[0].rpartition(":")[2]), recorder))
        except BaseException as failure:
            failures.append(failure)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_ready(ready: ReadyLine) -> None:
        threading.Thread(target=join, args=(ready,), daemon=True).start()

    # The transport of uvloop is compiled, and a profiler hook does not see calls of its methods in every CPython.
    with mock.patch.object(uvloop, "run", asyncio.run), tempfile.TemporaryDirectory() as folder:
        properties = {"log.dirs": folder, "listeners": "PLAINTEXT://127.0.0.1:0"}
        # With one shard, the first join opens the log to which the recorded joins append.
        properties["offsets.topic.num.partitions"] = "1"
        logging.disable(logging.INFO)
        threading.setprofile(recorder.on_event)
        sys.setprofile(recorder.on_event)
        try:
            run(BrokerConfig.from_properties(properties), on_ready)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
            logging.disable(logging.NOTSET)
    if failures:
        raise failures[0]
    common = ways[0]
    for way in ways[1:]:
        common = common.intersection(way)
    return common


def _join_groups(port: int, recorder: Recorder) -> list[Way]:
    with WireClient(port) as client:
        topics = [CreateTopicsRequest.CreatableTopic(name=TOPIC, num_partitions=3, replication_factor=1)]
        client.call(CreateTopicsRequest(topics=topics, timeout_ms=10_000), 7, CreateTopicsResponse)
        client.call(FindCoordinatorRequest(coordinator_keys=["warm-up"]), 6, FindCoordinatorResponse)
        _join_when_ready(client)
        ways = []
        for number in range(JOINS):
            recorder.arm()
            answer = client.call(_joining(f"group-{number}"), 1, ConsumerGroupHeartbeatResponse)
            assert answer.error_code == Errors.NONE and answer.member_epoch > 0, answer
            assert recorder.done.wait(_READY_SECONDS), "the recorder did not see the response"
            ways.append(recorder.way)
        return ways


def _join_when_ready(client: WireClient) -> None:
    """Joins a group until its shard is loaded, which happens after the first FindCoordinator has created the topic."""
    deadline = time.monotonic() + _READY_SECONDS
    while True:
        answer = client.call(_joining("warm-up"), 1, ConsumerGroupHeartbeatResponse)
        if answer.error_code == Errors.NONE:
            return
        assert time.monotonic() < deadline, answer
        time.sleep(0.02)


def _joining(group_id: str) -> Message:
    return ConsumerGroupHeartbeatRequest(
        group_id=group_id,
        member_id="member",
        member_epoch=0,
        rebalance_timeout_ms=60_000,
        subscribed_topic_names=[TOPIC],
        topic_partitions=[],
    )
