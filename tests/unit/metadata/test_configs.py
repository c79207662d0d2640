# SPDX-License-Identifier: Apache-2.0
"""IncrementalAlterConfigs and AlterConfigs, with the error codes that Kafka 4.3.1 returned for the same requests."""

from __future__ import annotations

import pytest

from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    AlterConfigsRequest,
    AlterConfigsResponse,
    IncrementalAlterConfigsRequest,
    IncrementalAlterConfigsResponse,
)
from tests.unit.metadata.cluster import Cluster, registration, topic

SET, DELETE, APPEND, SUBTRACT = range(4)
TOPIC, BROKER, LOGGER, METRICS, GROUP = 2, 4, 8, 16, 32

Change = tuple[str, int, str | None]
Resource = tuple[int, str, list[Change]]


@pytest.fixture
def cluster() -> Cluster:
    cluster = Cluster()
    cluster.create(topic("t", retention_ms="1000"))
    return cluster


def alter(
    cluster: Cluster, *resources: Resource, validate_only: bool = False
) -> list[IncrementalAlterConfigsResponse.AlterConfigsResourceResponse]:
    request = IncrementalAlterConfigsRequest(
        resources=[
            IncrementalAlterConfigsRequest.AlterConfigsResource(
                resource_type=kind,
                resource_name=name,
                configs=[
                    IncrementalAlterConfigsRequest.AlterableConfig(name=key, config_operation=operation, value=value)
                    for key, operation, value in changes
                ],
            )
            for kind, name, changes in resources
        ],
        validate_only=validate_only,
    )
    return cluster.run(lambda machine, context: machine.incremental_alter_configs(context, request)).responses


def error(cluster: Cluster, kind: int, name: str, *changes: Change) -> int:
    """Returns the error code; checks that an error does not change the image."""
    before = cluster.image
    (answer,) = alter(cluster, (kind, name, list(changes)))
    assert (answer.resource_type, answer.resource_name) == (kind, name)
    assert (answer.error_message is None) == (answer.error_code == 0)
    if answer.error_code:
        assert cluster.image is before
    return answer.error_code


def replace(
    cluster: Cluster, *resources: tuple[int, str, dict[str, str | None]], validate_only: bool = False
) -> list[AlterConfigsResponse.AlterConfigsResourceResponse]:
    request = AlterConfigsRequest(
        resources=[
            AlterConfigsRequest.AlterConfigsResource(
                resource_type=kind,
                resource_name=name,
                configs=[AlterConfigsRequest.AlterableConfig(name=key, value=value) for key, value in configs.items()],
            )
            for kind, name, configs in resources
        ],
        validate_only=validate_only,
    )
    return cluster.run(lambda machine, context: machine.alter_configs(context, request)).responses


def test_set_and_delete(cluster: Cluster) -> None:
    assert error(cluster, TOPIC, "t", ("retention.ms", SET, "5"), ("segment.ms", SET, "6")) == 0
    assert cluster.image.topic_configs("t") == {"retention.ms": "5", "segment.ms": "6"}
    assert error(cluster, TOPIC, "t", ("retention.ms", DELETE, None), ("segment.bytes", DELETE, "x")) == 0
    assert cluster.image.topic_configs("t") == {"segment.ms": "6"}


def test_setting_the_current_value_makes_no_record(cluster: Cluster) -> None:
    before = len(cluster.log)
    assert error(cluster, TOPIC, "t", ("retention.ms", SET, "1000"), ("no.such.key", DELETE, None)) == 0
    assert len(cluster.log) == before


def test_append_and_subtract(cluster: Cluster) -> None:
    def policy_after(operation: int, value: str) -> str | None:
        assert error(cluster, TOPIC, "t", ("cleanup.policy", operation, value)) == 0
        return cluster.image.topic_configs("t").get("cleanup.policy")

    assert policy_after(APPEND, "compact") == "delete,compact"
    assert policy_after(APPEND, "compact, delete") == "delete,compact"
    assert policy_after(SUBTRACT, "delete") == "compact"
    assert policy_after(SUBTRACT, "nothing") == "compact"
    assert policy_after(SUBTRACT, "compact") == ""
    throttled = "leader.replication.throttled.replicas"
    assert error(cluster, TOPIC, "t", (throttled, APPEND, "0:1")) == 0
    assert error(cluster, TOPIC, "t", (throttled, APPEND, "1:1")) == 0
    assert error(cluster, TOPIC, "t", (throttled, SUBTRACT, "0:1,5:5")) == 0
    assert cluster.image.topic_configs("t")[throttled] == "1:1"


def test_append_begins_with_the_default_of_the_broker() -> None:
    cluster = Cluster({"log.cleanup.policy": "compact"})
    cluster.create(topic("t"))
    assert error(cluster, TOPIC, "t", ("cleanup.policy", APPEND, "delete")) == 0
    assert cluster.image.topic_configs("t") == {"cleanup.policy": "compact,delete"}
    assert error(cluster, BROKER, "", ("log.cleanup.policy", APPEND, "delete")) == 0
    assert cluster.image.broker_configs() == {"log.cleanup.policy": "compact,delete"}


@pytest.mark.parametrize(
    ("kind", "name", "change", "expected"),
    [
        (TOPIC, "t", ("retention.ms", SET, None), Errors.INVALID_REQUEST),
        (TOPIC, "t", ("cleanup.policy", APPEND, None), Errors.INVALID_REQUEST),
        (TOPIC, "t", ("retention.ms", 7, "1"), Errors.INVALID_REQUEST),
        (TOPIC, "t", ("retention.ms", SET, "x"), Errors.INVALID_CONFIG),
        (TOPIC, "t", ("retention.ms", SET, ""), Errors.INVALID_CONFIG),
        (TOPIC, "t", ("no.such.key", SET, "x"), Errors.INVALID_CONFIG),
        (TOPIC, "t", ("retention.ms", APPEND, "1"), Errors.INVALID_CONFIG),
        (TOPIC, "t", ("retention.ms", SUBTRACT, "1"), Errors.INVALID_CONFIG),
        (TOPIC, "t", ("cleanup.policy", APPEND, "foo"), Errors.INVALID_CONFIG),
        (TOPIC, "nope", ("retention.ms", SET, "1"), Errors.UNKNOWN_TOPIC_OR_PARTITION),
        (TOPIC, "nope", ("retention.ms", SET, "x"), Errors.INVALID_CONFIG),
        (TOPIC, "nope", ("no.such.key", SET, "1"), Errors.INVALID_CONFIG),
        (TOPIC, "nope", ("retention.ms", APPEND, "1"), Errors.INVALID_CONFIG),
        (TOPIC, "", ("retention.ms", SET, "1"), Errors.INVALID_REQUEST),
        (TOPIC, "bad name!", ("retention.ms", SET, "1"), Errors.INVALID_TOPIC_EXCEPTION),
        (BROKER, "1", ("num.partitions", SET, "5"), Errors.INVALID_REQUEST),
        (BROKER, "", ("num.partitions", SET, "5"), Errors.INVALID_REQUEST),
        (BROKER, "1", ("num.partitions", DELETE, None), Errors.NONE),
        (BROKER, "1", ("some.plugins.key", SET, "5"), Errors.NONE),
        (BROKER, "2", ("log.cleaner.threads", SET, "5"), Errors.INVALID_REQUEST),
        (BROKER, "x", ("log.cleaner.threads", SET, "5"), Errors.INVALID_REQUEST),
        (BROKER, "01", ("log.cleaner.threads", SET, "5"), Errors.INVALID_REQUEST),
        (BROKER, "1" * 5000, ("log.cleaner.threads", SET, "5"), Errors.INVALID_REQUEST),
        (BROKER, "", ("log.cleaner.threads", SET, "x"), Errors.INVALID_REQUEST),
        (BROKER, "1", ("log.cleaner.threads", SET, "-1"), Errors.INVALID_REQUEST),
        (BROKER, "", ("sasl.jaas.config", SET, "x"), Errors.INVALID_REQUEST),
        (BROKER, "1", ("ssl.keystore.location", SET, "x"), Errors.INVALID_REQUEST),
        (BROKER, "", ("group.consumer.assignment.interval.ms", SET, "99999"), Errors.INVALID_REQUEST),
        (BROKER, "", ("group.consumer.assignment.interval.ms", SET, "10"), Errors.NONE),
        (BROKER, "", ("leader.replication.throttled.rate", SET, "5"), Errors.NONE),
        (METRICS, "cm", ("interval.ms", SET, "1000"), Errors.NONE),
        (METRICS, "cm", ("interval.ms", SET, "99"), Errors.INVALID_REQUEST),
        (METRICS, "cm", ("interval.ms", SET, "3600001"), Errors.INVALID_REQUEST),
        (METRICS, "cm", ("interval.ms", SET, "x"), Errors.INVALID_CONFIG),
        (METRICS, "cm", ("no.such.key", SET, "x"), Errors.INVALID_REQUEST),
        (METRICS, "cm", ("match", SET, "client_id=a.*,client_source_port=1"), Errors.NONE),
        (METRICS, "cm", ("match", SET, "client_id"), Errors.INVALID_CONFIG),
        (METRICS, "cm", ("match", SET, "client_id=["), Errors.INVALID_CONFIG),
        (METRICS, "cm", ("match", SET, "other=a"), Errors.INVALID_CONFIG),
        (METRICS, "cm", ("metrics", APPEND, "a"), Errors.INVALID_CONFIG),
        (METRICS, "", ("interval.ms", SET, "1000"), Errors.INVALID_REQUEST),
        (GROUP, "g", ("consumer.session.timeout.ms", SET, "50000"), Errors.NONE),
        (GROUP, "g", ("consumer.session.timeout.ms", SET, "1"), Errors.INVALID_CONFIG),
        (GROUP, "g", ("consumer.session.timeout.ms", SET, "70000"), Errors.INVALID_CONFIG),
        (GROUP, "g", ("consumer.session.timeout.ms", SET, "x"), Errors.INVALID_CONFIG),
        (GROUP, "g", ("consumer.session.timeout.ms", SET, None), Errors.INVALID_REQUEST),
        (GROUP, "g", ("consumer.session.timeout.ms", APPEND, "5"), Errors.INVALID_CONFIG),
        (GROUP, "g", ("no.such.key", SET, "1"), Errors.INVALID_CONFIG),
        (GROUP, "", ("consumer.session.timeout.ms", SET, "50000"), Errors.INVALID_REQUEST),
        (LOGGER, "1", ("root", SET, "INFO"), Errors.INVALID_REQUEST),
        (3, "x", ("a", SET, "1"), Errors.INVALID_REQUEST),
        (0, "x", ("a", SET, "1"), Errors.INVALID_REQUEST),
    ],
)
def test_errors(cluster: Cluster, kind: int, name: str, change: Change, expected: Errors) -> None:
    assert error(cluster, kind, name, change) == expected


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("1", [("num.partitions", SET, "5")], "Cannot update these configs dynamically: [num.partitions]"),
        ("", [("num.partitions", SET, "x")], "Cannot update these configs dynamically: [num.partitions]"),
        (
            "1",
            [("num.partitions", SET, "5"), ("node.id", SET, "5"), ("log.cleaner.threads", SET, "2")],
            "Cannot update these configs dynamically: [node.id, num.partitions]",
        ),
        (
            "1",
            [("ssl.keystore.location", SET, "/x")],
            "These security configs can be dynamically updated only per-listener using the listener prefix: "
            "[ssl.keystore.location]",
        ),
        (
            "",
            [("sasl.jaas.config", SET, "x"), ("listener.name.internal.ssl.keystore.location", SET, "/y")],
            "Cannot update these configs at default cluster level, broker id must be specified: "
            "[listener.name.internal.ssl.keystore.location, sasl.jaas.config]",
        ),
        ("1", [("num.partitions", APPEND, "5")], "Config value append is not allowed for config key: num.partitions"),
        ("", [("log.cleaner.threads", SET, None)], "Null value not supported for : log.cleaner.threads"),
        ("2", [("log.cleaner.threads", SET, "2")], "Unexpected broker id, expected 1, but received 2"),
        ("x", [("log.cleaner.threads", SET, "2")], "Node id must be an integer, but it is: x"),
    ],
)
def test_error_texts_for_broker_keys_are_those_of_kafka(
    cluster: Cluster, name: str, changes: list[Change], expected: str
) -> None:
    before = cluster.image
    (answer,) = alter(cluster, (BROKER, name, changes))
    assert answer.error_message == expected
    assert cluster.image is before


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("log.cleaner.threads", [("0", False), ("3", False), ("2", True), ("4", True), ("1", False), ("2", True)]),
        ("num.io.threads", [("0", False), ("3", False), ("17", False), ("16", True), ("8", True)]),
        ("num.network.threads", [("7", False), ("1", True), (None, False), ("2", True), ("4", True), (None, True)]),
    ],
)
@pytest.mark.parametrize("name", ["", "1"])
def test_a_thread_pool_is_at_most_halved_or_doubled_at_once(
    cluster: Cluster, name: str, key: str, values: list[tuple[str | None, bool]]
) -> None:
    """Kafka 4.3.1 accepts and rejects the same."""
    for value, is_accepted in values:
        change = (key, DELETE if value is None else SET, value)
        assert error(cluster, BROKER, name, change) == (Errors.NONE if is_accepted else Errors.INVALID_REQUEST), value


def test_the_texts_for_thread_pools_have_the_phrases_of_kafka(cluster: Cluster) -> None:
    for key, value, phrase in (
        ("log.cleaner.threads", "3", "Log cleaner threads cannot be increased to more than double the current value 1"),
        (
            "num.io.threads",
            "3",
            "Dynamic thread count update validation failed for num.io.threads=3, "
            "value should be at least half the current value 8",
        ),
    ):
        (answer,) = alter(cluster, (BROKER, "", [(key, SET, value)]))
        assert answer.error_message == f"Invalid value {value} for configuration {key}: {phrase}"


def test_replacing_configs_of_a_broker_returns_the_same_errors(cluster: Cluster) -> None:
    (answer,) = replace(cluster, (BROKER, "", {"num.partitions": "5", "log.cleaner.threads": "2"}))
    assert answer.error_code == Errors.INVALID_REQUEST
    assert answer.error_message == "Cannot update these configs dynamically: [num.partitions]"


LISTENER = "listener.name.internal."


@pytest.mark.parametrize(
    ("name", "key", "value", "expected"),
    [
        ("1", "ssl.keystore.location", "/y", Errors.NONE),
        ("1", "ssl.keystore.password", "secret", Errors.NONE),
        ("1", "plain.sasl.jaas.config", "x required;", Errors.NONE),
        ("1", "max.connections", "5", Errors.NONE),
        ("", "max.connections", "5", Errors.NONE),
        ("1", "max.connections", "x", Errors.INVALID_REQUEST),
        ("", "ssl.keystore.location", "/y", Errors.INVALID_REQUEST),
        ("1", "num.partitions", "5", Errors.NONE),
        ("1", "no.such.key", "5", Errors.NONE),
        ("1", "principal.builder.class", "org.example.Names", Errors.INVALID_REQUEST),
    ],
)
def test_keys_for_one_listener_are_kept(cluster: Cluster, name: str, key: str, value: str, expected: Errors) -> None:
    """Kafka 4.3.1 does the same, except that it would load the principal builder, which is rejected here."""
    assert error(cluster, BROKER, name, (LISTENER + key, SET, value)) == expected
    kept = cluster.image.broker_configs(int(name)) if name else cluster.image.broker_configs()
    assert kept == ({} if expected else {LISTENER + key: value})


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("consumer.session.timeout.ms", "1", " must be in the range 45000 to 60000 inclusive."),
        ("consumer.session.timeout.ms", "99999999", " must be in the range 45000 to 60000 inclusive."),
        ("consumer.heartbeat.interval.ms", "100000", " must be in the range 5000 to 15000 inclusive."),
        ("streams.num.standby.replicas", "9", " must be less than or equal to 2"),
        ("streams.task.offset.interval.ms", "1", " must be greater than or equal to 15000"),
    ],
)
def test_the_limits_of_group_values(cluster: Cluster, key: str, value: str, text: str) -> None:
    """The texts of Kafka 4.4.0."""
    (answer,) = alter(cluster, (GROUP, "g", [(key, SET, value)]))
    assert (answer.error_code, answer.error_message) == (Errors.INVALID_CONFIG, key + text)


def test_a_resource_changes_as_a_whole_or_not_at_all(cluster: Cluster) -> None:
    assert error(cluster, TOPIC, "t", ("retention.ms", SET, "8"), ("no.such.key", SET, "1")) == Errors.INVALID_CONFIG
    duplicate = ("retention.ms", SET, "8"), ("retention.ms", SET, "9")
    assert error(cluster, TOPIC, "t", *duplicate) == Errors.INVALID_REQUEST


def test_resources_are_independent_but_must_not_repeat(cluster: Cluster) -> None:
    answers = alter(
        cluster,
        (TOPIC, "t", [("retention.ms", SET, "8")]),
        (GROUP, "g", [("consumer.session.timeout.ms", SET, "1")]),
        (GROUP, "h", [("consumer.session.timeout.ms", SET, "50000")]),
    )
    assert [answer.error_code for answer in answers] == [0, Errors.INVALID_CONFIG, 0]
    answers = alter(cluster, (TOPIC, "t", [("retention.ms", SET, "9")]), (TOPIC, "t", [("retention.ms", SET, "10")]))
    assert [answer.error_code for answer in answers] == [Errors.INVALID_REQUEST] * 2
    assert cluster.image.topic_configs("t") == {"retention.ms": "8"}
    assert cluster.image.group_configs("h") == {"consumer.session.timeout.ms": "50000"}


def test_validating_changes_nothing(cluster: Cluster) -> None:
    before = cluster.image
    (answer,) = alter(cluster, (TOPIC, "t", [("retention.ms", SET, "9")]), validate_only=True)
    assert answer.error_code == 0
    (replaced,) = replace(cluster, (TOPIC, "t", {}), validate_only=True)
    assert replaced.error_code == 0
    assert cluster.image is before


def test_group_configs_fit_the_limits_of_this_broker() -> None:
    cluster = Cluster({"group.consumer.min.session.timeout.ms": "500"})
    assert error(cluster, GROUP, "g", ("consumer.session.timeout.ms", SET, "6000")) == 0
    assert error(cluster, GROUP, "g", ("consumer.session.timeout.ms", SET, "5000")) == Errors.INVALID_CONFIG


def test_replacing_removes_configs_that_are_not_named(cluster: Cluster) -> None:
    (answer,) = replace(cluster, (TOPIC, "t", {"segment.ms": "5"}))
    assert (answer.error_code, answer.error_message) == (0, None)
    assert cluster.image.topic_configs("t") == {"segment.ms": "5"}
    replace(cluster, (TOPIC, "t", {}))
    assert cluster.image.topic_configs("t") == {}


@pytest.mark.parametrize(
    ("kind", "name", "configs", "expected"),
    [
        (TOPIC, "t", {"retention.ms": None}, Errors.INVALID_REQUEST),
        (TOPIC, "t", {"no.such.key": "1"}, Errors.INVALID_CONFIG),
        (TOPIC, "t", {"retention.ms": "x"}, Errors.INVALID_CONFIG),
        (TOPIC, "nope", {}, Errors.UNKNOWN_TOPIC_OR_PARTITION),
        (TOPIC, "nope", {"no.such.key": "1"}, Errors.INVALID_CONFIG),
        (TOPIC, "", {}, Errors.INVALID_REQUEST),
        (BROKER, "1", {"log.cleaner.threads": "2"}, Errors.NONE),
        (BROKER, "9", {}, Errors.INVALID_REQUEST),
        (LOGGER, "1", {"root": "INFO"}, Errors.INVALID_REQUEST),
        (GROUP, "g", {"consumer.session.timeout.ms": "50000"}, Errors.NONE),
        (GROUP, "g", {"consumer.session.timeout.ms": "1"}, Errors.INVALID_CONFIG),
        (GROUP, "", {}, Errors.INVALID_REQUEST),
        (METRICS, "cm", {"interval.ms": "1000"}, Errors.NONE),
        (3, "x", {}, Errors.INVALID_REQUEST),
    ],
)
def test_replace_errors(
    cluster: Cluster, kind: int, name: str, configs: dict[str, str | None], expected: Errors
) -> None:
    (answer,) = replace(cluster, (kind, name, configs))
    assert answer.error_code == expected


def test_a_dynamic_config_of_one_broker_is_checked_together_with_those_of_all() -> None:
    cluster = Cluster()
    assert error(cluster, BROKER, "", ("group.consumer.assignment.interval.ms", SET, "15000")) == 0
    cluster.config.apply_dynamic(cluster.image.effective_broker_configs(1))
    assert cluster.config.group_consumer_assignment_interval_ms == 15000
    assert error(cluster, BROKER, "1", ("group.consumer.assignment.interval.ms", SET, "20")) == 0
    assert cluster.image.effective_broker_configs(1) == {"group.consumer.assignment.interval.ms": "20"}


def test_any_registered_broker_may_be_named(cluster: Cluster) -> None:
    cluster.register(registration(), registration(2))
    for name, expected in (("1", Errors.NONE), ("2", Errors.NONE), ("3", Errors.INVALID_REQUEST)):
        assert error(cluster, BROKER, name, ("log.cleaner.threads", SET, "2")) == expected


@pytest.mark.parametrize(
    ("all_brokers", "own", "changed", "expected"),
    [
        (None, None, "", Errors.INVALID_REQUEST),
        (None, "10", "", Errors.NONE),
        ("10", None, "1", Errors.INVALID_REQUEST),
        ("10", "10", "1", Errors.INVALID_REQUEST),
    ],
)
def test_a_value_of_one_broker_goes_before_that_of_all_brokers(
    cluster: Cluster, all_brokers: str | None, own: str | None, changed: str, expected: Errors
) -> None:
    """A value beyond a limit of this broker is refused where this broker would use it."""
    key = "group.consumer.assignment.interval.ms"
    for name, value in (("", all_brokers), ("1", own)):
        if value is not None:
            assert error(cluster, BROKER, name, (key, SET, value)) == 0
    assert error(cluster, BROKER, changed, (key, SET, "99999")) == expected


@pytest.mark.parametrize("match", ["client_id=[", "client_id", "client_shoe_size=4", "client_id=(?=x)"])
def test_matches_of_client_metrics_that_cannot_be_used(cluster: Cluster, match: str) -> None:
    assert error(cluster, METRICS, "cm", ("match", SET, match)) == Errors.INVALID_CONFIG
