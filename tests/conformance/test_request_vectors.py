# SPDX-License-Identifier: Apache-2.0
"""Sends every request vector whose API kcoord serves to Apache Kafka 4.3.1 and to kcoord, and compares the results.

The vectors are requests from Kafka's own serializer with arbitrary field values, valid and invalid. Each vector goes to
both brokers, on a connection of its own. A first pass warms the brokers up: it creates the topics and producers that
the vectors name. The second pass compares the error codes. Each difference needs a reason from docs/differences.md
("Requests that nobody should send").
"""

from __future__ import annotations

import gzip
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from confluent_kafka import Producer

from kcoord.server.api.served_versions import SERVED_VERSIONS
from kcoord_protocol.api_keys import ApiKey, request_class
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import encode_request
from tests.fuzz.verdicts import verdict
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess
from tests.support.shared import shared

SETTINGS = {
    "kcoord.release": "4.3",
    "group.initial.rebalance.delay.ms": "0",
    "offsets.topic.num.partitions": "4",
    "transaction.state.log.num.partitions": "4",
}
PATIENCE_SECONDS = 1.0
"""A broker that has not responded by then counts as silent. All responses of both brokers take milliseconds."""
SECOND_LOOKS = 10
SECOND_LOOK_SECONDS = 0.1
"""A vector whose responses differ is sent again.

Kafka creates topics some time after the Metadata request that needs them, and its response to a request with a timeout
of one millisecond depends on its speed.
"""
READY_SECONDS = 60.0
LEAST_VECTORS = 600
SMALL_PRODUCER_ID = 100
UNKNOWN_SERVER_ERROR = str(int(Errors.UNKNOWN_SERVER_ERROR))


class Vector(NamedTuple):
    """One recorded request."""

    key: ApiKey
    version: int
    body: bytes
    fields: dict[str, Any]
    """The message as Kafka's own JSON converter prints it."""

    def send(self, port: int) -> str:
        """Sends the request. Returns `closed`, `silent` or the error codes of the response."""
        return verdict(port, encode_request(self.key, self.version, 7, "vectors", self.body)[4:], PATIENCE_SECONDS)


class Difference(NamedTuple):
    """The verdicts of both brokers on one vector."""

    vector: Vector
    kafka: str
    kcoord: str


def _breaks_kafkas_session_cache(difference: Difference) -> bool:
    """Kafka computes the shard of a fetch session from its id, and fails if the id is negative or the largest."""
    session_id = difference.vector.fields.get("sessionId", 0)
    is_server_error = set(difference.kafka.split(",")) == {UNKNOWN_SERVER_ERROR}
    return difference.vector.key is ApiKey.FETCH and is_server_error and not 0 < session_id < 2**31 - 1


def _asks_nothing(difference: Difference) -> bool:
    fields = difference.vector.fields
    return (
        difference.vector.key is ApiKey.ADD_PARTITIONS_TO_TXN
        and fields.get("transactions") == []
        and (difference.kafka, difference.kcoord) == ("silent", "0")
    )


def _lacks_records(difference: Difference) -> bool:
    return difference.vector.key is ApiKey.PRODUCE and difference.kafka == "silent" and difference.kcoord != "closed"


def _lacks_config_value(difference: Difference) -> bool:
    resources = difference.vector.fields.get("resources", [])
    lacks_value = any(config["value"] is None for resource in resources for config in resource["configs"])
    return difference.vector.key is ApiKey.ALTER_CONFIGS and difference.kafka == "silent" and lacks_value


def _guesses_a_producer_id(difference: Difference) -> bool:
    """kcoord skips producer ids more often than Kafka, so a small id may belong to another producer."""
    errors = {Errors.INVALID_PRODUCER_EPOCH, Errors.INVALID_PRODUCER_ID_MAPPING, Errors.PRODUCER_FENCED}
    codes = {str(int(error)) for error in errors}
    is_guess = 0 <= difference.vector.fields.get("producerId", -1) < SMALL_PRODUCER_ID
    return is_guess and {difference.kafka, difference.kcoord} <= codes


def _has_unknown_acl_element(difference: Difference) -> bool:
    acl_requests = {ApiKey.DESCRIBE_ACLS, ApiKey.CREATE_ACLS, ApiKey.DELETE_ACLS}
    is_disabled = set(difference.kcoord.split(",")) == {str(int(Errors.SECURITY_DISABLED))}
    return difference.vector.key in acl_requests and difference.kafka == "closed" and is_disabled


def _names_an_owner_without_a_type(difference: Difference) -> bool:
    """The requester has not logged in, which kcoord answers first."""
    fields = difference.vector.fields
    return (
        difference.vector.key is ApiKey.CREATE_DELEGATION_TOKEN
        and fields.get("ownerPrincipalType", "") is None
        and bool(fields["ownerPrincipalName"])
        and difference.kafka == UNKNOWN_SERVER_ERROR
        and difference.kcoord == str(int(Errors.DELEGATION_TOKEN_REQUEST_NOT_ALLOWED))
    )


REASONS: tuple[Callable[[Difference], bool], ...] = (
    _breaks_kafkas_session_cache,
    _asks_nothing,
    _lacks_records,
    _lacks_config_value,
    _guesses_a_producer_id,
    _has_unknown_acl_element,
    _names_an_owner_without_a_type,
)
"""The known differences, each with a row in docs/differences.md."""


def _vectors() -> list[Vector]:
    keys = {request_class(key).__name__: key for key in SERVED_VERSIONS}
    path = shared("kafka-facts", "vectors.jsonl.gz")
    with gzip.open(path, "rt") as lines:
        entries = [json.loads(line) for line in lines]
    return [
        Vector(keys[entry["name"]], entry["version"], bytes.fromhex(entry["hex"]), entry["doc"])
        for entry in entries
        if entry["name"] in keys and entry["version"] in SERVED_VERSIONS[keys[entry["name"]]]
    ]


@pytest.fixture
def ports(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """The ports of a new Kafka and a new kcoord with the same settings."""
    settings = {key.replace(".", "_"): text for key, text in SETTINGS.items() if not key.startswith("kcoord.")}
    kafka = KafkaBroker(KafkaJars(), tmp_path / "kafka", **settings)
    kcoord = KcoordProcess(tmp_path, SETTINGS)
    try:
        kcoord.start()
        for port in (kafka.port, kcoord.port):
            # Kafka's transaction coordinator loads at its first use. Both brokers then give out the same producer ids.
            settings = {"bootstrap.servers": f"127.0.0.1:{port}", "transactional.id": "warm-up"}
            Producer(settings).init_transactions(READY_SECONDS)
        yield kafka.port, kcoord.port
    finally:
        kcoord.kill()
        kafka.stop()


@pytest.mark.java
def test_request_vectors_return_kafkas_error_codes(ports: tuple[int, int]) -> None:
    vectors = _vectors()
    assert len(vectors) >= LEAST_VECTORS
    with ThreadPoolExecutor(len(ports)) as pool:

        def send(vector: Vector) -> Difference:
            kafka, kcoord = pool.map(vector.send, ports)
            return Difference(vector, kafka, kcoord)

        def is_explained(difference: Difference) -> bool:
            return difference.kafka == difference.kcoord or any(explains(difference) for explains in REASONS)

        for vector in vectors:
            send(vector)
        unexplained = []
        for vector in vectors:
            difference = send(vector)
            for _ in range(SECOND_LOOKS):
                if is_explained(difference):
                    break
                time.sleep(SECOND_LOOK_SECONDS)
                difference = send(vector)
            if not is_explained(difference):
                unexplained.append(difference)
    texts = [
        f"{difference.vector.key.name} v{difference.vector.version}: Kafka {difference.kafka}, "
        f"kcoord {difference.kcoord}: {json.dumps(difference.vector.fields)[:500]}"
        for difference in unexplained
    ]
    assert not texts, "\n".join(texts)
