# SPDX-License-Identifier: Apache-2.0
"""`kcoord produce` and `kcoord consume`; `kcoord groups explain` and `watch`; `kcoord migrate --check`."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kcoord.cli import main
from tests.support.command_line import CommandLine
from tests.support.confluent import PolledConsumer, committed, create_topic, produce
from tests.support.kcoord_process import KcoordProcess


@pytest.fixture
def kcoord(broker: KcoordProcess) -> CommandLine:
    return CommandLine(broker.address)


def consume(kcoord: CommandLine, *arguments: str) -> list[str]:
    return kcoord.succeed("consume", *arguments, "--idle-timeout", "5000").out.splitlines()


def test_produced_lines_are_consumed(broker: KcoordProcess, kcoord: CommandLine, name: str) -> None:
    create_topic(broker.address, name, 2)
    kcoord.succeed("produce", name, "--key-separator", ":", "--null-marker", "-", stdin="a:1\nb:2\r\na:-")
    lines = consume(kcoord, name, "--from-beginning", "--max-messages", "3", "--key-separator", "=")
    assert sorted(lines) == ["a=1", "a=null", "b=2"]
    assert [line for line in lines if line.startswith("a")] == ["a=1", "a=null"]


def test_a_partition_is_copied_as_json(broker: KcoordProcess, kcoord: CommandLine, name: str) -> None:
    create_topic(broker.address, name)
    create_topic(broker.address, f"{name}-copy")
    lines = [json.dumps({"key": "k", "value": f"ü{n}", "headers": {"n": str(n)}, "timestamp_ms": n}) for n in range(20)]
    kcoord.succeed("produce", name, "--json", "--compression", "zstd", stdin="\n".join(lines))
    last = consume(kcoord, name, "--partition", "0", "--offset", "15", "--max-messages", "5", "--json")
    assert json.loads(last[0]) == {
        "topic": name,
        "partition": 0,
        "offset": 15,
        "timestamp_ms": 15,
        "key": "k",
        "value": "ü15",
        "headers": {"n": "15"},
    }
    kcoord.succeed("produce", f"{name}-copy", "--json", stdin="\n".join(last))
    copied = consume(kcoord, f"{name}-copy", "--from-beginning", "--max-messages", "5", "--json")
    assert [json.loads(line)["timestamp_ms"] for line in copied] == [15, 16, 17, 18, 19]


def test_a_line_that_is_not_a_record_fails(broker: KcoordProcess, kcoord: CommandLine, name: str) -> None:
    create_topic(broker.address, name)
    failed = kcoord.run("produce", name, "--json", stdin='{"value": "v"}\nodd\n')
    assert failed.code == 1
    assert "line 2: not valid JSON" in failed.err
    assert consume(kcoord, name, "--from-beginning", "--max-messages", "1") == ["v"]


def test_ctrl_c_ends_a_producer_that_waits_for_lines(broker: KcoordProcess, kcoord: CommandLine, name: str) -> None:
    create_topic(broker.address, name)
    command = [sys.executable, "-m", "kcoord", "produce", name, "--bootstrap-server", broker.address]
    # A shell starts background jobs with SIGINT ignored, and programs inherit that. A handler is not inherited.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    producer = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    signal.signal(signal.SIGINT, before)
    with producer:
        assert producer.stdin is not None
        assert producer.stderr is not None
        producer.stdin.write("v\n")
        producer.stdin.flush()
        assert consume(kcoord, name, "--from-beginning", "--max-messages", "1") == ["v"]
        producer.send_signal(signal.SIGINT)
        assert (producer.wait(30), producer.stderr.read()) == (130, "")


def test_a_line_that_is_too_large_is_named(broker: KcoordProcess, kcoord: CommandLine, name: str) -> None:
    create_topic(broker.address, name)
    failed = kcoord.run("produce", "--topic", name, stdin="v\n" + "x" * (1 << 20))
    assert failed.code == 1
    assert "error: line 2: a record of 1048597 bytes exceeds max_request_size" in failed.err
    assert consume(kcoord, name, "--from-beginning", "--max-messages", "1") == ["v"]


def test_a_partition_that_does_not_exist(broker: KcoordProcess, kcoord: CommandLine, name: str) -> None:
    create_topic(broker.address, name)
    failed = kcoord.run("produce", name, "--partition", "7", "--timeout", "500", stdin="v\n")
    reason = f"UNKNOWN_TOPIC_OR_PARTITION: {name}-7"
    assert failed.err == f"error: line 1: metadata of {name}: timed out after 500 ms: {reason}\n"


def test_a_group_continues_at_its_offsets(broker: KcoordProcess, kcoord: CommandLine, name: str) -> None:
    create_topic(broker.address, name)
    produce(broker.address, name, 1, 5)
    group = (name, "--group", name, "--from-beginning", "--max-messages")
    assert consume(kcoord, *group, "3") == ["0:0", "0:1", "0:2"]
    assert committed(broker.address, name, [(name, 0)]) == {(name, 0): 3}
    assert consume(kcoord, *group, "2") == ["0:3", "0:4"]


@pytest.mark.parametrize(("number", "times", "code"), [(signal.SIGTERM, 1, 143), (signal.SIGHUP, 2, 129)])
def test_a_signal_commits_and_leaves_the_group(
    broker: KcoordProcess, kcoord: CommandLine, name: str, number: signal.Signals, times: int, code: int
) -> None:
    """SIGHUP often comes twice if a terminal is closed, since the kernel and the shell send it."""
    create_topic(broker.address, name)
    produce(broker.address, name, 1, 3)
    command = [sys.executable, "-m", "kcoord", "consume", name, "--group", name, "--from-beginning"]
    # nohup starts programs with SIGHUP ignored, and their children inherit that.
    before = signal.signal(number, signal.SIG_DFL)
    consumer = subprocess.Popen([*command, "--bootstrap-server", broker.address], stdout=subprocess.PIPE)
    signal.signal(number, before)
    with consumer:
        assert consumer.stdout is not None
        assert [consumer.stdout.readline() for _ in range(3)] == [b"0:0\n", b"0:1\n", b"0:2\n"]
        for _ in range(times):
            consumer.send_signal(number)
            time.sleep(0.001)
        assert consumer.wait(20) == code
    assert committed(broker.address, name, [(name, 0)]) == {(name, 0): 3}
    (group,) = json.loads(kcoord.succeed("consumer-groups", "--describe", "--group", name, "--state", "--json").out)
    assert (group["state"], group["members"]) == ("Empty", 0)


def test_files_of_kafkas_tools_are_used(broker: KcoordProcess, kcoord: CommandLine, name: str, tmp_path: Path) -> None:
    """The files are those of Kafka's console producer and consumer, with keys that only Java clients know."""
    create_topic(broker.address, name)
    producer = tmp_path / "producer.properties"
    producer.write_text("acks=1\ncompression.type=gzip\nkey.serializer=org.apache.kafka.common.serialization.Long\n")
    made = kcoord.succeed("produce", name, "--command-config", str(producer), stdin="a\nb\nc\n")
    assert made.err.startswith("warning: key.serializer has no effect here")
    consumer = tmp_path / "consumer.properties"
    consumer.write_text(f"group.id={name}\nauto.offset.reset=earliest\nsession.timeout.ms=45000\n")
    arguments = (name, "--command-config", str(consumer), "--max-messages", "2", "--idle-timeout", "5000")
    read = kcoord.succeed("consume", *arguments)
    assert read.out.split() == ["a", "b"]
    assert "warning: session.timeout.ms has no effect here: the group decides" in read.err
    assert committed(broker.address, name, [(name, 0)]) == {(name, 0): 2}
    included = kcoord.succeed("consume", "--include", name, *arguments[1:3], "--max-messages", "1")
    assert included.out.split() == ["c"], "the group is in the file"
    without_group = ("--include", name, "--command-config", str(producer))
    assert "--include needs --group" in kcoord.run("consume", *without_group).err


def test_nothing_to_read(broker: KcoordProcess, kcoord: CommandLine, name: str) -> None:
    create_topic(broker.address, name)
    assert kcoord.succeed("consume", name, "--from-beginning", "--idle-timeout", "100").out == ""
    missing = kcoord.run("consume", name, "--partition", "7", "--idle-timeout", "100")
    assert (missing.code, missing.err) == (1, f"kcoord consume: {name} has no partition 7\n")


def test_groups_explained_and_watched(
    broker: KcoordProcess, kcoord: CommandLine, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    create_topic(broker.address, name, 2)
    watch = [
        "groups",
        "watch",
        "--group",
        name,
        "--interval",
        "0.1",
        "--duration",
        "2.5",
        "--bootstrap-server",
        broker.address,
    ]
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(main, watch)
        with PolledConsumer(broker.address, name, [name], instance_id="one") as member:
            produce(broker.address, name, 2, 1)
            member.wait_for(2)
            explained = main(["groups", "explain", "--group", name, "--bootstrap-server", broker.address])
        assert (explained, watching.result()) == (0, 0)
    printed = capsys.readouterr().out
    for text in (
        "convergence    complete: no member is waited for",
        "static member  one belongs to",
        "joined",
        f" took {name}:0,1",
        "left and may return",
    ):
        assert text in printed


def test_migration(broker: KcoordProcess, kcoord: CommandLine, name: str) -> None:
    create_topic(broker.address, name)
    produce(broker.address, name, 1, 1)
    check = ("--check", "--group", name, "--json")
    assert kcoord.run("migrate", *check).code == 1
    with PolledConsumer(broker.address, name, [name], classic="range") as member:
        member.wait_for(1)
        answer = json.loads(kcoord.succeed("migrate", *check).out)
        assert (answer["can_convert"], len(answer["reasons"])) == (True, 1)
    with PolledConsumer(broker.address, name, [name]) as member:
        produce(broker.address, name, 1, 1)
        member.wait_for(1)
        assert "already" in kcoord.succeed("migrate", *check).out
