# SPDX-License-Identifier: Apache-2.0
"""Compares the reaction of kcoord and Apache Kafka to many damaged and plausible requests.

A verdict is `closed`, `silent` (no response within half a second), or the error codes of the response in ascending
order. Each input is sent alone, on its own connection, to brokers with the same topics and groups.

`python -m tests.fuzz.verdicts COUNT` sends the inputs to Kafka 4.3.1 and kcoord, and prints the differences with their
reasons, if known. `--record` writes `inputs/verdicts.txt`: input, Kafka's verdict, and kcoord's verdict with the reason
if it differs.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import NamedTuple, cast

from confluent_kafka import Producer

from kcoord.server.api.served_versions import SERVED_VERSIONS
from kcoord_protocol.api_keys import ApiKey, request_class, response_class
from kcoord_protocol.errors import DecodeError, Errors, UnsupportedVersionError
from kcoord_protocol.framing import FrameReader, decode_request_header, decode_response_header, encode_request
from kcoord_protocol.message import Struct
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
)
from tests.fuzz.corpus import recorded
from tests.fuzz.mutation import damaged, plausible
from tests.integration.wire import WireClient
from tests.support.confluent import create_topic, produce
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess
from tests.support.waiting import wait_until

SILENCE_SECONDS = 0.5
LONGEST_BYTES = 400
TOPICS = {"orders": 3, "new": 1, "t": 1}
GROUPS = ("g1", "confluent-range")
SETTINGS = {
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
}
REASONS = ("", "text", "tags", "length", "records", "server-error", "nothing-asked", "repeated", "header")
_LEFT_OUT = {
    ApiKey.ALTER_CONFIGS,
    ApiKey.INCREMENTAL_ALTER_CONFIGS,
    ApiKey.CREATE_TOPICS,
    ApiKey.DELETE_TOPICS,
    ApiKey.CREATE_PARTITIONS,
    ApiKey.ALTER_PARTITION_REASSIGNMENTS,
    ApiKey.ELECT_LEADERS,
}
"""These change the state that later requests find; in Kafka, some time after their response."""
RECORDED = Path(__file__).parent / "inputs" / "verdicts.txt"


def inputs(count: int, seed: int) -> Iterator[bytes]:
    """Yields frames without their length. About a third are damaged frames of real clients."""
    chance = Random(seed)
    starts = [frame for frame in recorded() if int.from_bytes(frame[:2], "big") not in _LEFT_OUT]
    served = [(key, version) for key, versions in SERVED_VERSIONS.items() for version in versions]
    while count:
        if chance.random() < 0.35:
            frame = damaged(chance.choice(starts), chance)
        else:
            key, version = chance.choice(served)
            cls = request_class(key)
            if version not in cls.valid_versions:
                continue
            frame = encode_request(key, version, 7, "fuzz", plausible(cls, version, chance).encode(version))[4:]
            if chance.random() < 0.3:
                frame = damaged(frame, chance)
        if not 0 < len(frame) <= LONGEST_BYTES or int.from_bytes(frame[:2], "big") in _LEFT_OUT:
            continue
        count -= 1
        yield frame


def prepare(port: int) -> None:
    """Creates topics with some records, and groups with an offset, so that every input finds nearly the same state."""
    address = f"127.0.0.1:{port}"
    for topic, partitions in TOPICS.items():
        create_topic(address, topic, partitions)
    produce(address, "orders", 3, 5)
    Producer({"bootstrap.servers": address, "transactional.id": "fuzz", "log_level": 2}).init_transactions(60)
    for group_id in GROUPS:
        partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=0, committed_offset=3)
        topics = [OffsetCommitRequest.OffsetCommitRequestTopic(name="orders", partitions=[partition])]
        commit = OffsetCommitRequest(group_id=group_id, generation_id_or_member_epoch=-1, topics=topics)

        def is_done(group_id: str = group_id, commit: OffsetCommitRequest = commit) -> bool:
            with WireClient(port) as client:
                find = FindCoordinatorRequest(coordinator_keys=[group_id])
                client.call(find, 4, FindCoordinatorResponse)
                answer = client.call(commit, 9, OffsetCommitResponse)
            return answer.topics[0].partitions[0].error_code == Errors.NONE

        wait_until(is_done, f"{group_id} has an offset", 30)


def verdict(port: int, frame: bytes, patience_seconds: float = SILENCE_SECONDS) -> str:
    """Sends one input and returns the verdict."""
    key, version = int.from_bytes(frame[:2], "big"), int.from_bytes(frame[2:4], "big")
    with socket.create_connection(("127.0.0.1", port), 10) as connection:
        connection.settimeout(patience_seconds)
        reader = FrameReader(1 << 26)
        try:
            connection.sendall(len(frame).to_bytes(4, "big") + frame)
            while not (frames := reader.feed(data := connection.recv(1 << 16))):
                if not data:
                    return "closed"
        except TimeoutError:
            return "silent"
        except ConnectionError:
            return "closed"
    if key == ApiKey.API_VERSIONS and version not in SERVED_VERSIONS[ApiKey.API_VERSIONS]:
        version = 0
    _, position = decode_response_header(frames[0], key, version)
    answer = response_class(key).decode(frames[0][position:], version)
    return ",".join(map(str, sorted(error_codes(answer))))


def error_codes(struct: Struct) -> Iterator[int]:
    """Yields all error codes of a message, in the order of its fields."""
    for name in struct.__slots__:
        value = getattr(struct, name, None)
        if name == "error_code":
            yield int(value or 0)
        elif isinstance(value, Struct):
            yield from error_codes(value)
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, Struct):
                    yield from error_codes(item)


def verdicts(port: int, frames: list[bytes]) -> list[str]:
    prepare(port)
    return [verdict(port, frame) for frame in frames]


@contextmanager
def kafka(folder: Path) -> Iterator[int]:
    settings = {key.replace(".", "_"): value for key, value in SETTINGS.items()}
    broker = KafkaBroker(KafkaJars(), folder / "kafka", **settings)
    try:
        yield broker.port
    finally:
        broker.stop()


@contextmanager
def kcoord(folder: Path) -> Iterator[int]:
    (folder / "kcoord").mkdir()
    process = KcoordProcess(folder / "kcoord", SETTINGS).start()
    try:
        yield process.port
    finally:
        process.kill()


def versions_of(port: int) -> dict[int, range]:
    """Returns the API versions that a broker serves."""
    with WireClient(port) as client:
        answer = client.call(ApiVersionsRequest(), 0, ApiVersionsResponse)
    return {api.api_key: range(api.min_version, api.max_version + 1) for api in answer.api_keys}


def is_of(frame: bytes, versions: dict[int, range]) -> bool:
    """Returns False if only kcoord serves the request, so that Kafka's verdict means nothing."""
    key, version = int.from_bytes(frame[:2], "big"), int.from_bytes(frame[2:4], "big")
    return version not in SERVED_VERSIONS.get(cast("ApiKey", key), ()) or version in versions.get(key, ())


def refusal(frame: bytes) -> str:
    """Returns why kcoord cannot decode a request; empty if it can."""
    try:
        header, position = decode_request_header(frame)
        request_class(header.request_api_key).decode_prefix(frame, position, header.request_api_version)
    except (DecodeError, UnsupportedVersionError) as error:
        return str(error)
    return ""


class Row(NamedTuple):
    """An input with the verdicts of both brokers."""

    frame: bytes
    theirs: str
    ours: str

    @property
    def why(self) -> str:
        """The reason of a difference, or empty if it is unknown.

        Each reason is a row of docs/differences.md, "Requests that nobody should send".
        """
        key = int.from_bytes(self.frame[:2], "big")
        refused = refusal(self.frame) if self.ours == "closed" else ""
        for word, why in (("UTF-8", "text"), ("tagged", "tags"), ("length", "length")):
            if word in refused:
                return why
        if key == ApiKey.PRODUCE and (self.theirs == "silent" or set(self.theirs.split(",")) == {"2"}):
            return "records"
        if "-1" in self.theirs.split(","):
            return "server-error"
        if key == ApiKey.ADD_PARTITIONS_TO_TXN and self.theirs == "silent":
            return "nothing-asked"
        if key == ApiKey.WRITE_TXN_MARKERS and len(self.theirs) < len(self.ours):
            return "repeated"
        if key == ApiKey.API_VERSIONS and self.ours == str(int(Errors.UNSUPPORTED_VERSION)):
            return "header"
        return ""

    def line(self) -> str:
        differs = f" {self.ours or '-'} {self.why or 'unknown'}" if self.ours != self.theirs else ""
        return f"{self.frame.hex()} {self.theirs or '-'}{differs}\n"


def name_of(frame: bytes) -> str:
    key, version = int.from_bytes(frame[:2], "big"), int.from_bytes(frame[2:4], "big", signed=True)
    try:
        return f"{ApiKey(key).name} v{version}"
    except ValueError:
        return f"key {key} v{version}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("count", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with kafka(Path(folder)) as port:
            frames = [frame for frame in inputs(options.count, options.seed) if is_of(frame, versions_of(port))]
            theirs = verdicts(port, frames)
        with kcoord(Path(folder)) as port:
            ours = verdicts(port, frames)
    rows = [Row(*row) for row in zip(frames, theirs, ours, strict=True)]
    differ = [row for row in rows if row.ours != row.theirs]
    for (why, name), count in Counter((row.why, name_of(row.frame)) for row in differ).most_common():
        print(f"{count:5} {why or 'UNKNOWN'}: {name}")
    for row in differ:
        if not row.why:
            print(f"{name_of(row.frame)}: kcoord {row.ours}, Kafka {row.theirs}: {row.frame.hex()}")
    print(f"{len(differ)} of {len(rows)} differ; Kafka: {Counter(v if v.isalpha() else 'answer' for v in theirs)}")
    if options.record:
        RECORDED.write_text("".join(row.line() for row in rows))


if __name__ == "__main__":
    main()
