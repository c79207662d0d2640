# SPDX-License-Identifier: Apache-2.0
"""The same changes of broker configs on kcoord and on a real Kafka 4.3.1 broker.

The tests compare errors, texts, and the configs that both describe afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest

from kcoord.metadata.image import BROKER_RESOURCE
from kcoord_protocol.messages import (
    AlterConfigsRequest,
    AlterConfigsResponse,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from tests.integration.wire import WireClient
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import FAST, KcoordProcess
from tests.support.waiting import wait_until

pytestmark = pytest.mark.java

SET, DELETE, APPEND = 0, 1, 2
LISTENER = "listener.name.internal."
STATIC = {
    "num.partitions": "1",
    "some.plugins.key": "5",
    LISTENER + "ssl.keystore.location": "/x",
    LISTENER + "ssl.keystore.password": "pw",
    "listener.name.plaintext.max.connections": "77",
}
ALTERATIONS: list[tuple[str, list[tuple[str, int, str | None]]]] = [
    ("1", [("num.partitions", SET, "5")]),
    ("", [("num.partitions", SET, "x")]),
    ("1", [("num.partitions", SET, "5"), ("node.id", SET, "5"), ("log.cleaner.threads", SET, "2")]),
    ("1", [("num.partitions", DELETE, None)]),
    ("1", [("num.partitions", APPEND, "5")]),
    ("1", [("ssl.keystore.location", SET, "/x")]),
    ("", [("ssl.keystore.location", SET, "/x")]),
    ("", [("sasl.jaas.config", SET, "x")]),
    ("1", [("sasl.jaas.config", SET, "x y required;")]),
    ("", [("sasl.enabled.mechanisms", SET, "PLAIN")]),
    ("1", [("sasl.enabled.mechanisms", SET, "PLAIN")]),
    ("1", [("some.other.key", SET, "5")]),
    ("", [("some.other.key", SET, "5")]),
    ("1", [(LISTENER + "ssl.keystore.location", SET, "/y")]),
    ("", [(LISTENER + "ssl.keystore.location", SET, "/y")]),
    ("1", [(LISTENER + "ssl.keystore.password", SET, "secret")]),
    ("1", [(LISTENER + "sasl.jaas.config", SET, "x y required;")]),
    ("1", [(LISTENER + "plain.sasl.jaas.config", SET, "x y required;")]),
    ("1", [(LISTENER + "max.connections", SET, "5")]),
    ("", [(LISTENER + "max.connections", SET, "6")]),
    ("", [(LISTENER + "max.connection.creation.rate", SET, "6")]),
    ("1", [(LISTENER + "num.partitions", SET, "5")]),
    ("1", [(LISTENER + "log.cleaner.threads", SET, "5")]),
    ("1", [(LISTENER + "no.such.key", SET, "5")]),
    ("1", [("listener.name.INTERNAL.ssl.truststore.location", SET, "/z")]),
    ("2", [("log.cleaner.threads", SET, "2")]),
    ("x", [("log.cleaner.threads", SET, "2")]),
    ("", [("log.cleaner.threads", SET, None)]),
]


@pytest.fixture(scope="module")
def ports(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, int]]:
    """The ports of kcoord and of Kafka."""
    folder = tmp_path_factory.mktemp("kcoord")
    kcoord = KcoordProcess(folder, {**FAST, **STATIC}).start()
    kafka = KafkaBroker(KafkaJars(), tmp_path_factory.mktemp("kafka"), **STATIC)
    try:
        yield kcoord.port, kafka.port
    finally:
        kcoord.stop()
        kafka.stop()


def altered(client: WireClient, name: str, changes: list[tuple[str, int, str | None]]) -> tuple[int, str | None]:
    configs = [
        IncrementalAlterConfigsRequest.AlterableConfig(name=key, config_operation=operation, value=value)
        for key, operation, value in changes
    ]
    resource = IncrementalAlterConfigsRequest.AlterConfigsResource(
        resource_type=BROKER_RESOURCE, resource_name=name, configs=configs
    )
    request = IncrementalAlterConfigsRequest(resources=[resource])
    (answer,) = client.call(request, 1, IncrementalAlterConfigsResponse).responses
    return answer.error_code, answer.error_message


def replaced(client: WireClient, name: str, configs: dict[str, str]) -> tuple[int, str | None]:
    resource = AlterConfigsRequest.AlterConfigsResource(
        resource_type=BROKER_RESOURCE,
        resource_name=name,
        configs=[AlterConfigsRequest.AlterableConfig(name=key, value=value) for key, value in configs.items()],
    )
    (answer,) = client.call(AlterConfigsRequest(resources=[resource]), 2, AlterConfigsResponse).responses
    return answer.error_code, answer.error_message


def described(client: WireClient, name: str) -> dict[str, tuple[object, ...]]:
    """Returns the described keys that are in no table of keys.

    Leaves out the values of their synonyms, whose defaults may differ.
    """
    resource = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=BROKER_RESOURCE, resource_name=name, configuration_keys=None
    )
    request = DescribeConfigsRequest(resources=[resource], include_synonyms=True, include_documentation=True)
    (answer,) = client.call(request, 4, DescribeConfigsResponse).results
    return {
        config.name: (
            config.value,
            config.read_only,
            config.config_source,
            config.is_sensitive,
            config.config_type,
            config.documentation,
            [
                (synonym.name, synonym.value, synonym.source)
                for synonym in config.synonyms
                if synonym.name == config.name
            ],
            [synonym.name for synonym in config.synonyms],
        )
        for config in answer.configs
        if config.name.startswith(("listener.name.", "some."))
    }


def wait_until_described_alike(kcoord: WireClient, kafka: WireClient, name: str) -> None:
    """Waits until both describe the same configs: Kafka applies a change some time after its response."""
    expected = described(kcoord, name)
    with suppress(AssertionError):
        wait_until(lambda: described(kafka, name) == expected, "Kafka describes the changes", 10)
    assert described(kafka, name) == expected


def test_changes_are_answered_and_described_as_by_kafka(ports: tuple[int, int]) -> None:
    with WireClient(ports[0]) as kcoord, WireClient(ports[1]) as kafka:
        for name, changes in ALTERATIONS:
            assert altered(kcoord, name, changes) == altered(kafka, name, changes), (name, changes)
        for name in ("1", ""):
            wait_until_described_alike(kcoord, kafka, name)
        for name in ("1", ""):
            configs = {"num.partitions": "5", "log.cleaner.threads": "2"}
            assert replaced(kcoord, name, configs) == replaced(kafka, name, configs)
        # The configs of all brokers are left out here: Kafka keeps min.insync.replicas, which is among these.
        assert replaced(kcoord, "1", {}) == replaced(kafka, "1", {}) == (0, None)
        wait_until_described_alike(kcoord, kafka, "1")
