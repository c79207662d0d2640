# SPDX-License-Identifier: Apache-2.0
"""The process that runs an assignor of one's own: `python -m kcoord.assignors.process REFERENCE CONNECTION LIFELINE`.

The broker (`kcoord.server.shards.own_assignors`) starts it with two sockets. The first message on CONNECTION is the
assignor's name or an error. Then each request, a pickle of members and topics, gets one response, a JSON object with
`assignment` or `error`. The responses are JSON, since the broker does not trust them: it checks each partition.

LIFELINE has no messages. It is closed when the broker ends, also by `kill -9`. A thread waits for that, since the
assignor itself may never return.
"""

from __future__ import annotations

import importlib
import json
import operator
import os
import pickle
import sys
import threading
import traceback
from collections.abc import Mapping
from importlib.metadata import entry_points
from itertools import islice
from multiprocessing.connection import Connection

from kcoord.assignors import Assignment, ServerAssignor, Topic

_NICENESS = 10
"""Heartbeats of other groups come first if the machine has few cores."""


def main(reference: str, connection: int, lifeline: int) -> None:
    """Serves requests until the broker closes the connection."""
    threading.Thread(target=_exit_with_broker, args=(lifeline,), daemon=True).start()
    os.nice(_NICENESS)
    broker = Connection(connection)
    try:
        assignor = load(reference)
        name = assignor.name
    except Exception as error:
        broker.send_bytes(json.dumps({"error": _text_of(error)}).encode())
        return
    broker.send_bytes(json.dumps({"name": name}).encode())
    while True:
        try:
            members, topics = pickle.loads(broker.recv_bytes())
        except EOFError:
            return
        try:
            assignment = assignor.assign(members, topics)
            response = json.dumps({"assignment": _as_lists(assignment, len(members), topics)}, default=operator.index)
        except Exception as error:
            traceback.print_exc()
            response = json.dumps({"error": _text_of(error)})
        broker.send_bytes(response.encode())


def _as_lists(
    assignment: Assignment, member_count: int, topics: Mapping[str, Topic]
) -> dict[str, dict[str, list[int]]]:
    """Returns the assignment with lists. It ends after one member or one partition too many, and is invalid then.

    So a result without an end, or a very large one, fills no memory.
    """
    left = sum(topic.partition_count for topic in topics.values()) + 1
    lists: dict[str, dict[str, list[int]]] = {}
    for member_id, assigned in islice(assignment.items(), member_count + 1):
        lists[member_id] = {}
        for topic, partitions in assigned.items():
            numbers = lists[member_id][topic] = list(islice(partitions, left))
            left -= len(numbers)
    return lists


def load(reference: str) -> ServerAssignor:
    """Returns a new object of the class. Raises ImportError, AttributeError or TypeError if that is impossible."""
    if ":" in reference:
        module, _, attribute = reference.partition(":")
        kind = getattr(importlib.import_module(module), attribute)
    else:
        (entry,) = entry_points(group="kcoord.assignors", name=reference)
        kind = entry.load()
    if not (isinstance(kind, type) and issubclass(kind, ServerAssignor)):
        raise TypeError(f"{reference} is not a subclass of kcoord.assignors.ServerAssignor")
    return kind()


def _text_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _exit_with_broker(lifeline: int) -> None:
    os.read(lifeline, 1)
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
