# SPDX-License-Identifier: Apache-2.0
"""The processes of assignors of one's own: results, failures of every kind, and classes that cannot be loaded."""

from __future__ import annotations

import errno
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from kcoord.assignors import Member, Topic
from kcoord.config import BrokerConfig
from kcoord.coordinator.group.assignor.spec import MemberSpec, no_racks
from kcoord.coordinator.group.consumer.assignment import (
    ComputedTarget,
    ComputeTarget,
    FailedComputation,
    TargetInput,
)
from kcoord.coordinator.group.consumer.client_assignors import ClientAssignor
from kcoord.coordinator.group.consumer.group import ClassicMemberMetadata
from kcoord.server.errors import StartError
from kcoord.server.shards.own_assignors import AssignorError, OwnAssignor, start_own_assignors
from kcoord_protocol.messages import ConsumerGroupDescribeResponse, ConsumerProtocolSubscription
from tests.docs.terminal import blocks_of
from tests.support.shared import ROOT
from tests.support.waiting import wait_until
from tests.unit.group.group_context import DEFAULTS, GroupContext

MODULE = """
import os, sys, time
from itertools import count, repeat
from pathlib import Path
from kcoord.assignors import ServerAssignor

FOLDER = Path({folder!r})

class Good(ServerAssignor):
    name = "good"

    def assign(self, members, topics):
        print("an assignor may print")
        (FOLDER / "pid").write_text(str(os.getpid()))
        (FOLDER / "input").write_text(repr((sorted(members.items()), sorted(topics.items()))))
        code = (FOLDER / "code").read_text()
        return eval(code, {{**globals(), "members": members, "topics": topics}})

class SameName(Good):
    pass

class BadName(Good):
    name = "ünicode"

class Slow(Good):
    @property
    def name(self):
        raise RuntimeError("no name today")

class Foreign:
    name = "foreign"

def spin():
    while True:
        pass

def fork():
    if not os.fork():
        time.sleep(60)
        os._exit(0)
    return {{"m": {{"t": [0, 1]}}}}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "assignors_of_a_test.py").write_text(MODULE.format(folder=str(tmp_path)))
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.fixture
def good(folder: Path) -> Iterator[OwnAssignor]:
    assignor = OwnAssignor("assignors_of_a_test:Good", 5_000)
    yield assignor
    assignor.close()


def work() -> TargetInput:
    """Returns the input of a group with the member m and topic t of two partitions."""
    settings = {"group.consumer.assignors": "uniform,p:C", "kcoord.assignor.timeout.ms": "300"}
    config = BrokerConfig.from_properties(DEFAULTS | settings)
    config.name_assignor("p:C", "good")
    context = GroupContext({"t": 2}, config=config)
    context.join("g", "m", ["t"], assignor="good", rack="r1")
    target = context.shard.target_input(ComputeTarget("g"))
    assert target is not None
    return target


def outcome(assignor: OwnAssignor, folder: Path, code: str) -> object:
    (folder / "code").write_text(code)
    value = assignor.compute(work())
    if isinstance(value, FailedComputation):
        assert (value.group_id, value.assignor) == ("g", "good")
        return value.reason
    assert isinstance(value, ComputedTarget)
    assert value.encoded
    return {member_id: sorted(*topics.values()) for member_id, topics in value.changed.items()}


def test_it_gets_members_and_topics_and_its_result_becomes_a_target(good: OwnAssignor, folder: Path) -> None:
    assert outcome(good, folder, "{'m': {'t': [0, 1]}}") == {"m": [0, 1]}
    member = "Member(instance_id=None, rack_id='r1', topics=frozenset({'t'}), assigned={}, metadata={})"
    assert (folder / "input").read_text() == (
        f"([('m', {member})], [('t', Topic(partition_count=2, racks=[frozenset(), frozenset()]))])"
    )


def test_partitions_may_be_numbers_of_any_library(good: OwnAssignor, folder: Path) -> None:
    """Numbers of numpy have `__index__`, but are no `int`."""
    number = "type('int64', (), {'__init__': lambda n, i: setattr(n, 'i', i), '__index__': lambda n: n.i})"
    assert outcome(good, folder, f"{{'m': {{'t': map({number}, range(2))}}}}") == {"m": [0, 1]}


def test_it_gets_the_metadata_of_client_side_assignors_and_the_user_data_of_classic_members(
    good: OwnAssignor, folder: Path
) -> None:
    target = work()
    offered = (ClientAssignor("x", 0, 1, 0, 1, b"new"), ClientAssignor("y", 0, 1, 0, 1, b""))
    subscription = ConsumerProtocolSubscription(topics=["t"], user_data=b"old").encode(1)
    classic = ClassicMemberMetadata(10_000, (("z", b"\0\1" + subscription),))
    target.members = {
        "m": replace(target.members["m"], client_assignors=offered),
        "n": replace(target.members["m"], member_id="n", classic=classic),
    }
    (folder / "code").write_text("{'m': {'t': [0, 1]}}")
    assert isinstance(good.compute(target), ComputedTarget)
    given = (folder / "input").read_text()
    assert "metadata={'x': b'new'}" in given
    assert "metadata={'z': b'old'}" in given


def test_what_the_class_prints_goes_to_stderr(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assignor = OwnAssignor("assignors_of_a_test:Good", 5_000)
    assert outcome(assignor, folder, "{'m': {'t': [0, 1]}}") == {"m": [0, 1]}
    assignor.close()
    out, err = capfd.readouterr()
    assert (out, err) == ("", "an assignor may print\n")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("None", "AttributeError: 'NoneType' object has no attribute 'items'"),
        ("{'m': {'t': [0]}}", "partition t-1 has no owner"),
        ("{'m': {'t': ['0', 1]}}", "the partitions of topic t for member m are not numbers"),
        ("{'m': {'t': [True, 1]}}", "the partitions of topic t for member m are not numbers"),
        ("{'m': {'u': [0]}}", "no member subscribes to topic u"),
        ("{7: {'t': [0, 1]}}", "member 7 is not in the group"),
        ("{'m': {'t': [object()]}}", "TypeError: 'object' object cannot be interpreted as an integer"),
        ("os._exit(3)", "its process ended with exit code 3"),
        ("sys.exit(4)", "its process ended with exit code 4"),
    ],
)
def test_a_failure_is_told_and_the_next_request_works(good: OwnAssignor, folder: Path, code: str, reason: str) -> None:
    assert outcome(good, folder, code) == reason
    assert outcome(good, folder, "{'m': {'t': [1, 0]}}") == {"m": [0, 1]}


def test_the_text_of_an_exception_is_cut_so_that_the_group_can_be_described(good: OwnAssignor, folder: Path) -> None:
    reason = outcome(good, folder, "{}['x' * 1_000_000]")
    assert isinstance(reason, str)
    assert reason.startswith("KeyError: 'xxx")
    group = ConsumerGroupDescribeResponse.DescribedGroup(assignor_error=reason)
    ConsumerGroupDescribeResponse(groups=[group]).encode(1)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        ("{'m': {'t': count()}}", "topic t has no partition 2"),
        ("{'m': {'t': repeat(1)}}", "partition t-1 has two owners, m and m"),
        ("{'m': {'u': count()}}", "no member subscribes to topic u"),
        ("{f'n{n}': {'t': range(2)} for n in range(1_000)}", "member n0 is not in the group"),
    ],
)
def test_a_result_without_an_end_is_cut_and_told(
    good: OwnAssignor, folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, reason: str
) -> None:
    """The process would fill the memory until it is late, and a large response would fill that of the broker."""
    sizes: list[int] = []
    loads = json.loads

    def noted(data: bytes) -> object:
        sizes.append(len(data))
        return loads(data)

    monkeypatch.setattr("kcoord.server.shards.own_assignors.json.loads", noted)
    assert outcome(good, folder, code) == reason
    assert sizes[0] < 100


def test_members_with_the_same_subscription_share_its_topics(
    good: OwnAssignor, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set of names for each member would be ten million names for 10,000 members and 1,000 topics."""
    sizes: list[int] = []
    dumps = pickle.dumps

    def noted(value: object) -> bytes:
        data = dumps(value)
        sizes.append(len(data))
        return data

    monkeypatch.setattr("kcoord.server.shards.own_assignors.pickle.dumps", noted)
    names = {number.to_bytes(16): f"topic-{number}" for number in range(200)}
    topic_ids = frozenset(names)
    specs = {f"member-{number}": MemberSpec(subscribed_topic_ids=topic_ids) for number in range(2_000)}
    (folder / "code").write_text("{max(members): {name: [0] for name in topics}}")
    assignment = good.assign(specs, dict.fromkeys(names, 1), no_racks, names)
    assert assignment["member-999"] == dict.fromkeys(names, frozenset({0}))
    assert sizes[0] < 200_000


def test_an_assignor_that_never_returns_is_killed(folder: Path) -> None:
    assignor = OwnAssignor("assignors_of_a_test:Good", 300)
    try:
        # A loaded machine may kill it before it can tell its number itself.
        assert assignor._process is not None
        killed = assignor._process.pid
        reason = outcome(assignor, folder, "spin()")
        assert reason == "it did not finish within 300 ms (kcoord.assignor.timeout.ms)"
        with pytest.raises(ProcessLookupError):
            os.kill(killed, 0)
    finally:
        assignor.close()


def test_processes_that_the_assignor_starts_end_with_it(folder: Path) -> None:
    """They have the connection too, so its end would not be seen while they live."""
    assignor = OwnAssignor("assignors_of_a_test:Good", 2_000)
    assert outcome(assignor, folder, "fork()") == {"m": [0, 1]}
    late = "it did not finish within 2000 ms (kcoord.assignor.timeout.ms)"
    assert outcome(assignor, folder, "(fork(), os._exit(5))[0]") == late
    assert outcome(assignor, folder, "{'m': {'t': [0, 1]}}") == {"m": [0, 1]}
    assignor.close()


def test_a_class_that_is_gone_later_is_told_each_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assignor = OwnAssignor("assignors_of_a_test:Good", 5_000)
    assert outcome(assignor, folder, "os._exit(3)") == "its process ended with exit code 3"
    (folder / "assignors_of_a_test.py").write_text("")
    gone = "AttributeError: module 'assignors_of_a_test' has no attribute 'Good'"
    assert [outcome(assignor, folder, "None") for _ in range(2)] == [gone, gone]

    def no_sockets() -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("socket.socketpair", no_sockets)
    assert outcome(assignor, folder, "None") == "its process cannot be started: Too many open files"


def test_a_process_ends_with_its_broker_even_if_the_assignor_spins(folder: Path) -> None:
    (folder / "code").write_text("spin()")
    ours, theirs = socket.socketpair()
    broker, lifeline = socket.socketpair()
    with theirs, lifeline:
        numbers = (theirs.fileno(), lifeline.fileno())
        process = subprocess.Popen(
            [sys.executable, "-m", "kcoord.assignors.process", "assignors_of_a_test:Good", *map(str, numbers)],
            pass_fds=numbers,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
    with Connection(ours.detach()) as connection:
        assert json.loads(connection.recv_bytes()) == {"name": "good"}
        connection.send_bytes(pickle.dumps(({}, {})))
        wait_until((folder / "pid").exists, "the assignor runs")
        # The end of a broker process closes its sockets.
        broker.close()
        assert process.wait(5) == 0


def test_a_longer_time_limit_counts_for_the_start_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some libraries take long to load. The text of the failure names the limit."""
    monkeypatch.setattr("kcoord.server.shards.own_assignors._START_MS", 1)
    with pytest.raises(AssignorError, match=r"did not finish within 2 ms \(kcoord.assignor.timeout.ms\)"):
        OwnAssignor("assignors_of_a_test:Good", 2)
    OwnAssignor("assignors_of_a_test:Good", 10_000).close()


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("nowhere:Good", "ModuleNotFoundError: No module named 'nowhere'"),
        ("assignors_of_a_test:Absent", "AttributeError: module 'assignors_of_a_test' has no attribute 'Absent'"),
        (
            "assignors_of_a_test:Foreign",
            "TypeError: assignors_of_a_test:Foreign is not a subclass of kcoord.assignors.ServerAssignor",
        ),
        ("assignors_of_a_test:Slow", "RuntimeError: no name today"),
        ("assignors_of_a_test:BadName", "its name must be printable ASCII text, not 'ünicode'"),
        ("assignors_of_a_test:Good,assignors_of_a_test:SameName", "another assignor has its name, good"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_a_class_that_cannot_be_used_ends_the_start(setting: str, reason: str) -> None:
    config = BrokerConfig.from_properties({"group.consumer.assignors": f"uniform,{setting}"})
    with pytest.raises(StartError) as refused:
        start_own_assignors(config)
    last = setting.split(",")[-1]
    assert str(refused.value) == f"Invalid value {last} for configuration group.consumer.assignors: {reason}"


def test_the_assignor_of_the_guide_keeps_partitions_on_their_instances() -> None:
    blocks = blocks_of((ROOT / "docs" / "guides" / "own-assignor.md").read_text())
    (code,) = (block.text for block in blocks if block.title == "pinned.py")
    names: dict[str, Any] = {}
    exec(code, names)
    topics = {"t": Topic(5), "u": Topic(2)}
    members = {f"m{n}": Member(f"reader-{n}", topics=frozenset(topics)) for n in (0, 2, 10)}
    assignment = names["Pinned"]().assign(members, topics)
    assert assignment == {"m0": {"t": [0, 3], "u": [0]}, "m2": {"t": [1, 4], "u": [1]}, "m10": {"t": [2]}}


@pytest.mark.usefixtures("folder")
def test_members_use_the_name_of_the_class() -> None:
    config = BrokerConfig.from_properties({"group.consumer.assignors": "assignors_of_a_test:Good,range"})
    started = start_own_assignors(config)
    assert list(started) == ["good"]
    assert config.consumer_assignors == ["good", "range"]
    config.apply_dynamic({"group.consumer.assignment.interval.ms": "5"})
    assert config.consumer_assignors == ["good", "range"]
    started["good"].close()
