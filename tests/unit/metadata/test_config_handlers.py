# SPDX-License-Identifier: Apache-2.0
"""The handlers of configs: topics, brokers, loggers, client metrics and groups."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator

import pytest

from kcoord.server.api.handlers import (
    alter_configs,
    describe_configs,
    incremental_alter_configs,
    list_config_resources,
    list_partition_reassignments,
)
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    AlterConfigsRequest,
    DescribeConfigsRequest,
    DescribeConfigsResponse,
    IncrementalAlterConfigsRequest,
    ListConfigResourcesRequest,
    ListPartitionReassignmentsRequest,
)
from tests.support.calls import count_calls
from tests.unit.metadata.cluster import Cluster
from tests.unit.metadata.serving import broker_of, context, settle


async def ask_configs(
    broker: Broker,
    *resources: tuple[int, str, list[str] | None],
    version: int = 4,
    synonyms: bool = False,
    documentation: bool = False,
) -> list[DescribeConfigsResponse.DescribeConfigsResult]:
    request = DescribeConfigsRequest(
        resources=[
            DescribeConfigsRequest.DescribeConfigsResource(
                resource_type=kind, resource_name=name, configuration_keys=keys
            )
            for kind, name, keys in resources
        ],
        include_synonyms=synonyms,
        include_documentation=documentation,
    )
    reply = describe_configs.handle(broker, context(ApiKey.DESCRIBE_CONFIGS, version), request)
    return (await settle(reply, version)).results


@pytest.mark.parametrize("version", describe_configs.VERSIONS)
async def test_describe_configs_in_every_version(cluster: Cluster, version: int) -> None:
    results = await ask_configs(broker_of(cluster), (2, "t3", ["retention.ms", "nope"]), version=version, synonyms=True)
    (result,) = results
    assert (result.error_code, result.error_message, result.resource_type, result.resource_name) == (0, "", 2, "t3")
    (entry,) = result.configs
    assert (entry.name, entry.value, entry.config_source, entry.read_only) == ("retention.ms", "604800000", 5, False)
    assert entry.config_type == (5 if version >= 3 else 0)
    assert [synonym.name for synonym in entry.synonyms] == ["log.retention.hours"]
    assert not entry.documentation


@pytest.mark.parametrize(
    ("kind", "name", "error", "count"),
    [
        (2, "t3", Errors.NONE, 37),
        (2, "nope", Errors.UNKNOWN_TOPIC_OR_PARTITION, 0),
        (2, "bad name!", Errors.INVALID_TOPIC_EXCEPTION, 0),
        (2, "", Errors.INVALID_TOPIC_EXCEPTION, 0),
        (4, "", Errors.NONE, 0),
        (4, "2", Errors.INVALID_REQUEST, 0),
        (4, "x", Errors.INVALID_REQUEST, 0),
        (8, "", Errors.INVALID_REQUEST, 0),
        (8, "2", Errors.INVALID_REQUEST, 0),
        (16, "cm", Errors.NONE, 3),
        (16, "", Errors.INVALID_REQUEST, 0),
        (32, "g", Errors.NONE, 22),
        (32, "", Errors.INVALID_REQUEST, 0),
    ],
)
async def test_described_resources(cluster: Cluster, kind: int, name: str, error: Errors, count: int) -> None:
    no_keys: tuple[list[str] | None, ...] = (None, [])
    for keys in no_keys:
        (result,) = await ask_configs(broker_of(cluster), (kind, name, keys))
        assert (result.error_code, len(result.configs)) == (error, count)


def request_for(*names: str) -> DescribeConfigsRequest:
    """Returns a request for all configs of these groups."""
    resources = [
        DescribeConfigsRequest.DescribeConfigsResource(resource_type=32, resource_name=name, configuration_keys=None)
        for name in names
    ]
    return DescribeConfigsRequest(resources=resources, include_synonyms=True, include_documentation=True)


def test_resources_with_equal_configs_share_their_entries(cluster: Cluster) -> None:
    broker = broker_of(cluster)
    few, many = request_for("a"), request_for(*map(str, range(describe_configs.RESOURCES_PER_TURN)))

    def calls(request: DescribeConfigsRequest) -> int:
        return count_calls(lambda: describe_configs.handle(broker, context(ApiKey.DESCRIBE_CONFIGS, 4), request))

    assert calls(many) < 2 * calls(few)


async def described(
    broker: Broker, *names: str, turns: Callable[[], None] = lambda: None
) -> list[DescribeConfigsResponse.DescribeConfigsResult]:
    """Describes groups. Calls `turns` in every turn of the event loop in which the response is not ready."""
    reply = describe_configs.handle(broker, context(ApiKey.DESCRIBE_CONFIGS, 4), request_for(*names))
    while isinstance(reply, asyncio.Future) and not reply.done():
        turns()
        await asyncio.sleep(0)
    response = await reply if isinstance(reply, asyncio.Future) else reply
    return DescribeConfigsResponse.decode(response.encode(4), 4).results


async def test_many_resources_are_described_in_several_turns(cluster: Cluster) -> None:
    broker = broker_of(cluster)
    turns: list[None] = []
    names = [str(number) for number in range(3 * describe_configs.RESOURCES_PER_TURN)]
    one_by_one = [result for name in names for result in await described(broker, name)]
    assert await described(broker, *names, turns=lambda: turns.append(None)) == one_by_one
    assert len(turns) > 3


async def test_a_response_has_a_limited_number_of_configs(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kafka has no such limit: the response to a request of 4 MB for the configs of 800,000 groups has 2 GB or more."""
    monkeypatch.setattr(describe_configs, "MOST_CONFIGS", 25 * 22)
    broker = broker_of(cluster)
    names = [str(number) for number in range(26)]
    assert len(await described(broker, *names[:25])) == 25
    with pytest.raises(KafkaError, match="describe fewer resources") as caught:
        await described(broker, *names)
    assert caught.value.error is Errors.INVALID_REQUEST


@pytest.mark.parametrize("kind", [-1, 0, 1, 3, 64])
async def test_a_resource_of_unknown_type_fails_the_whole_request(cluster: Cluster, kind: int) -> None:
    """Kafka 4.3.1 and 4.4.0 return this error for every resource of such a request."""
    with pytest.raises(KafkaError, match="This most likely occurs because of a request being malformed") as caught:
        await ask_configs(broker_of(cluster), (2, "t3", None), (kind, "x", None))
    assert caught.value.error == Errors.INVALID_REQUEST


async def test_described_broker_and_documentation(cluster: Cluster) -> None:
    broker = broker_of(cluster)
    (result,) = await ask_configs(broker, (4, "1", None), documentation=True)
    assert len(result.configs) > 300
    assert all(entry.documentation for entry in result.configs)
    assert not any(entry.synonyms for entry in result.configs)


@pytest.fixture
def our_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("kcoord.test_handlers")
    yield logger
    logger.setLevel(logging.NOTSET)


async def test_loggers(cluster: Cluster, our_logger: logging.Logger) -> None:
    broker = broker_of(cluster)

    async def alter(name: str, logger: str, operation: int, value: str | None) -> int:
        request = IncrementalAlterConfigsRequest(
            resources=[
                IncrementalAlterConfigsRequest.AlterConfigsResource(
                    resource_type=8,
                    resource_name=name,
                    configs=[
                        IncrementalAlterConfigsRequest.AlterableConfig(
                            name=logger, config_operation=operation, value=value
                        )
                    ],
                )
            ]
        )
        request_context = context(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1)
        response = await settle(incremental_alter_configs.handle(broker, request_context, request), 1)
        return response.responses[0].error_code

    async def level() -> str | None:
        (result,) = await ask_configs(broker, (8, "1", [our_logger.name]))
        assert result.configs[0].config_source == 6
        return result.configs[0].value

    assert await alter("1", our_logger.name, 0, "DEBUG") == 0
    assert (our_logger.level, await level()) == (logging.DEBUG, "DEBUG")
    assert await alter("1", our_logger.name, 0, "FATAL") == 0
    assert (our_logger.level, await level()) == (logging.CRITICAL, "FATAL")
    assert await alter("1", our_logger.name, 1, None) == 0
    assert our_logger.level == logging.NOTSET
    assert await alter("1", our_logger.name, 0, "LOUD") == Errors.INVALID_CONFIG
    assert await alter("1", "kafka.x", 0, "INFO") == Errors.INVALID_CONFIG
    assert await alter("1", our_logger.name, 2, "INFO") == Errors.INVALID_REQUEST
    assert await alter("1", "root", 1, None) == Errors.INVALID_REQUEST
    assert await alter("2", our_logger.name, 0, "INFO") == Errors.INVALID_REQUEST
    assert await alter("", our_logger.name, 0, "INFO") == Errors.INVALID_REQUEST


async def test_loggers_and_other_resources_in_one_request(cluster: Cluster, our_logger: logging.Logger) -> None:
    broker = broker_of(cluster)
    changes = [(8, "1", our_logger.name, "ERROR"), (2, "t3", "retention.ms", "5"), (8, "2", our_logger.name, "INFO")]
    request = IncrementalAlterConfigsRequest(
        resources=[
            IncrementalAlterConfigsRequest.AlterConfigsResource(
                resource_type=kind,
                resource_name=name,
                configs=[IncrementalAlterConfigsRequest.AlterableConfig(name=key, value=value)],
            )
            for kind, name, key, value in changes
        ]
    )
    request_context = context(ApiKey.INCREMENTAL_ALTER_CONFIGS, 1)
    response = await settle(incremental_alter_configs.handle(broker, request_context, request), 1)
    errors = {(result.resource_type, result.resource_name): result.error_code for result in response.responses}
    assert errors == {(8, "1"): 0, (2, "t3"): 0, (8, "2"): Errors.INVALID_REQUEST}
    assert our_logger.level == logging.ERROR
    assert cluster.image.topic_configs("t3") == {"retention.ms": "5"}


@pytest.mark.parametrize("version", alter_configs.VERSIONS)
async def test_alter_configs_in_every_version(cluster: Cluster, version: int) -> None:
    request = AlterConfigsRequest(
        resources=[
            AlterConfigsRequest.AlterConfigsResource(
                resource_type=2,
                resource_name="t3",
                configs=[AlterConfigsRequest.AlterableConfig(name="retention.ms", value="5")],
            )
        ]
    )
    reply = alter_configs.handle(broker_of(cluster), context(ApiKey.ALTER_CONFIGS, version), request)
    response = await settle(reply, version)
    assert [result.error_code for result in response.responses] == [0]
    assert cluster.image.topic_configs("t3") == {"retention.ms": "5"}


async def list_resources(broker: Broker, types: list[int], version: int = 1) -> list[tuple[int, str]]:
    request = ListConfigResourcesRequest(resource_types=types)
    reply = list_config_resources.handle(broker, context(ApiKey.LIST_CONFIG_RESOURCES, version), request)
    response = await settle(reply, version)
    return [(resource.resource_type, resource.resource_name) for resource in response.config_resources]


async def test_list_config_resources(cluster: Cluster) -> None:
    request = IncrementalAlterConfigsRequest(
        resources=[
            IncrementalAlterConfigsRequest.AlterConfigsResource(
                resource_type=kind,
                resource_name=name,
                configs=[IncrementalAlterConfigsRequest.AlterableConfig(name=key, value=value)],
            )
            for kind, name, key, value in (
                (32, "g", "consumer.session.timeout.ms", "50000"),
                (16, "cm", "interval.ms", "1000"),
            )
        ]
    )
    cluster.run(lambda machine, operation: machine.incremental_alter_configs(operation, request))
    broker = broker_of(cluster)
    assert await list_resources(broker, [], 0) == [(16, "cm")]
    assert await list_resources(broker, []) == [(32, "g"), (16, "cm"), (8, "1"), (4, "1"), (2, "t3"), (2, "t6")]
    assert await list_resources(broker, [2, 2]) == [(2, "t3"), (2, "t6")]
    assert await list_resources(broker, [32]) == [(32, "g")]
    with pytest.raises(KafkaError) as caught:
        await list_resources(broker, [32, 99])
    assert caught.value.error is Errors.UNSUPPORTED_VERSION


async def test_no_reassignment_is_ever_in_progress(cluster: Cluster) -> None:
    request = ListPartitionReassignmentsRequest(topics=None)
    reply = list_partition_reassignments.handle(
        broker_of(cluster), context(ApiKey.LIST_PARTITION_REASSIGNMENTS, 0), request
    )
    response = await settle(reply, 0)
    assert (response.error_code, response.topics) == (0, [])
