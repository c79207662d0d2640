# SPDX-License-Identifier: Apache-2.0
"""Runs assignors of one's own (`kcoord.assignors`), each in a process of its own.

Theory of operation. An assignor is foreign code: it may raise, return nonsense, use much memory or never return. A
thread cannot be stopped, so the assignor runs in a process (`kcoord.assignors.process`). It starts with the broker,
which refuses to start if the class cannot be loaded.

A background thread of the group coordinator sends a request and waits for the response. Before that it starts a
watchdog. If the response is late, the watchdog kills the process and those that it has started, and ends the
connection. The next request starts a new process. What the assignor returns is checked as a whole before it becomes a
target. If anything goes wrong, the group keeps its present target, and the state machine asks again after a pause
(`FailedComputations`).
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import Final

from kcoord.assignors import Member, Topic
from kcoord.config import BrokerConfig
from kcoord.coordinator.group.assignor.check import InvalidAssignment, checked_assignment
from kcoord.coordinator.group.assignor.spec import Assignment, MemberSpec, PartitionRacks
from kcoord.coordinator.group.consumer.assignment import (
    FailedComputation,
    TargetInput,
    computed_target,
    encode,
    member_specs,
    partition_racks,
)
from kcoord.coordinator.group.consumer.client_computation import offered_assignors
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.server.errors import StartError
from kcoord_protocol.errors import shortened

_logger = logging.getLogger(__name__)

MAX_RESPONSE_BYTES: Final = 256 << 20
_START_MS: Final = 10_000
_EXIT_SECONDS: Final = 1.0
_STDERR: Final = 2
_KEY: Final = "group.consumer.assignors"


class AssignorError(Exception):
    """The assignor could not be loaded, failed, or took too long; the text says why."""


class OwnAssignor:
    """One assignor and its process. The methods block; one request is computed at a time."""

    def __init__(self, reference: str, timeout_ms: int) -> None:
        """Starts the process. Raises AssignorError if the class cannot be loaded."""
        self._reference = reference
        self._timeout_ms = timeout_ms
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None
        self._socket: socket.socket | None = None
        """The broker's end of the connection. Its shutdown wakes a thread that reads, whoever holds the other end."""
        self._lifeline: socket.socket | None = None
        name = self._start().get("name")
        if not isinstance(name, str) or not name or not name.isascii() or not name.isprintable():
            self.close()
            raise AssignorError(f"its name must be printable ASCII text, not {name!r}")
        self.name = name

    def _start(self) -> Mapping[str, object]:
        """Starts the process and returns its first response. Raises AssignorError, also if the class is gone."""
        try:
            self._start_process()
        except OSError as error:
            raise AssignorError(f"its process cannot be started: {error.strerror}") from None
        try:
            return self._exchange(None, max(_START_MS, self._timeout_ms))
        except AssignorError:
            self.close()
            raise

    def _start_process(self) -> None:
        self._socket, theirs = socket.socketpair()
        self._lifeline, lifeline = socket.socketpair()
        with theirs, lifeline:
            numbers = (theirs.fileno(), lifeline.fileno())
            # Unbuffered, so that what the class prints is not lost when the process is killed.
            command = [sys.executable, "-u", "-m", "kcoord.assignors.process", self._reference, *map(str, numbers)]
            # The class may be in a folder that only this process has in its path.
            path = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                command,
                pass_fds=numbers,
                stdin=subprocess.DEVNULL,
                # What the class prints is a log. It must not be between the results of a command.
                stdout=_STDERR,
                env=os.environ | {"PYTHONPATH": path},
                start_new_session=True,
            )
        self._connection = Connection(os.dup(self._socket.fileno()))

    def compute(self, work: TargetInput) -> object:
        """Returns the value of a ComputeTarget task: a ComputedTarget with encoded records, or a FailedComputation."""
        names = {topic_id: work.image.topics_by_id[topic_id].name for topic_id in work.partition_counts}
        specs = member_specs(work)
        for member_id, member in work.members.items():
            offered = offered_assignors(member)
            specs[member_id].metadata = {assignor.name: assignor.metadata for assignor in offered if assignor.metadata}
        try:
            assignment = self.assign(specs, work.partition_counts, partial(partition_racks, work.image), names)
        except AssignorError as error:
            reason = shortened(str(error))
            text = "The assignor %s failed for group %s, which keeps its target assignment: %s"
            _logger.warning(text, self.name, work.group_id, reason)
            return FailedComputation(work.group_id, self.name, reason)
        computed = computed_target(work, specs, assignment)
        encode(computed, CoordinatorSerde().serialize)
        return computed

    def assign(
        self,
        specs: Mapping[str, MemberSpec],
        partition_counts: Mapping[bytes, int],
        racks: PartitionRacks,
        names: Mapping[bytes, str],
    ) -> Assignment:
        """Returns the assignment of all members. `names` has the names of the topics in `partition_counts`.

        Raises AssignorError if the assignor fails, or if it does not give each partition to exactly one subscriber.
        """
        # Members with equal subscriptions have the same object. They share its names, so the request has them once.
        subscriptions = {id(spec.subscribed_topic_ids): spec.subscribed_topic_ids for spec in specs.values()}
        subscribed = {key: frozenset(names[topic_id] for topic_id in ids) for key, ids in subscriptions.items()}
        members = {
            member_id: Member(
                spec.instance_id,
                spec.rack_id,
                subscribed[id(spec.subscribed_topic_ids)],
                {names[topic_id]: partitions for topic_id, partitions in spec.assigned.items() if topic_id in names},
                spec.metadata,
            )
            for member_id, spec in specs.items()
        }
        topics = {names[topic_id]: Topic(count, racks(topic_id)) for topic_id, count in partition_counts.items()}
        request = pickle.dumps((members, topics))
        with self._lock:
            if self._process is None:
                self._start()
            proposed = self._exchange(request, self._timeout_ms).get("assignment")
        try:
            return checked_assignment(_with_topic_ids(proposed, names), specs, partition_counts, names)
        except InvalidAssignment as error:
            raise AssignorError(str(error)) from None

    def _exchange(self, request: bytes | None, timeout_ms: int) -> Mapping[str, object]:
        """Sends the request, if there is one, and returns the response. Raises AssignorError."""
        process, connection = self._process, self._connection
        assert process is not None
        assert connection is not None
        late = threading.Event()

        def end() -> None:
            late.set()
            self._end(process)

        watchdog = threading.Timer(timeout_ms / 1000, end)
        watchdog.start()
        try:
            if request is not None:
                connection.send_bytes(request)
            response = json.loads(connection.recv_bytes(MAX_RESPONSE_BYTES))
        except (EOFError, OSError):
            with suppress(subprocess.TimeoutExpired):
                # A process that ends by itself closes its connection a little earlier.
                process.wait(_EXIT_SECONDS)
            self.close()
            if late.is_set():
                raise AssignorError(f"it did not finish within {timeout_ms} ms (kcoord.assignor.timeout.ms)") from None
            raise AssignorError(f"its process ended with exit code {process.returncode}") from None
        finally:
            watchdog.cancel()
        if not isinstance(response, dict):
            raise AssignorError("its process answered with something else than an object")
        if "error" in response:
            raise AssignorError(str(response["error"]))
        return response

    def close(self) -> None:
        """Ends the process; a request that runs fails."""
        process, self._process = self._process, None
        if process is not None:
            self._end(process)
            process.wait()
        for end in (self._connection, self._socket, self._lifeline):
            if end is not None:
                end.close()

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        """Kills the process and those that it has started, which would otherwise keep the connection open."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        if self._socket is not None:
            with suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)


def _with_topic_ids(proposed: object, names: Mapping[bytes, str]) -> dict[str, dict[bytes, list[int]]]:
    """Returns the assignment with topic ids. Raises InvalidAssignment if it has another form, or unknown topics."""
    topic_ids = {name: topic_id for topic_id, name in names.items()}
    assignment: dict[str, dict[bytes, list[int]]] = {}
    for member_id, topics in _dict(proposed).items():
        assignment[member_id] = {}
        for name, partitions in _dict(topics).items():
            if name not in topic_ids:
                raise InvalidAssignment(f"no member subscribes to topic {name}")
            if not isinstance(partitions, list) or not all(type(partition) is int for partition in partitions):
                raise InvalidAssignment(f"the partitions of topic {name} for member {member_id} are not numbers")
            assignment[member_id][topic_ids[name]] = partitions
    return assignment


def _dict(value: object) -> dict[str, object]:
    if not isinstance(value, dict):
        raise InvalidAssignment("it is not a mapping from members to mappings from topics to partitions")
    return value


def start_own_assignors(config: BrokerConfig) -> dict[str, OwnAssignor]:
    """Starts the assignors that are not built in, and tells the configuration their names. Returns them by name.

    Raises StartError with the key and the reason.
    """
    started: list[OwnAssignor] = []
    try:
        for reference in config.own_assignors:
            assignor = OwnAssignor(reference, config.kcoord_assignor_timeout_ms)
            started.append(assignor)
            if assignor.name in config.consumer_assignors:
                raise AssignorError(f"another assignor has its name, {assignor.name}")
            config.name_assignor(reference, assignor.name)
    except AssignorError as error:
        for assignor in started:
            assignor.close()
        raise StartError(f"Invalid value {reference} for configuration {_KEY}: {error}") from None
    return {assignor.name: assignor for assignor in started}
