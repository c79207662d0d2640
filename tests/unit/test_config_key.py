# SPDX-License-Identifier: Apache-2.0
"""Values of single configuration keys: parsing, errors with their texts, printing."""

from __future__ import annotations

import pytest

from kcoord.config import (
    BROKER_KEYS,
    GROUP_KEYS,
    TOPIC_KEYS,
    BrokerConfig,
    ConfigError,
    ConfigKey,
    ConfigType,
    value_to_string,
)
from kcoord.config.key import ConfigValue, in_range, java_double, one_of
from tests.support.shared import shared


def key(type_: ConfigType, default: ConfigValue = None) -> ConfigKey:
    return ConfigKey("some.key", type_, default)


@pytest.mark.parametrize(
    ("type_", "text", "value"),
    [
        (ConfigType.BOOLEAN, " TRUE ", True),
        (ConfigType.BOOLEAN, "false", False),
        (ConfigType.INT, "-2147483648", -(2**31)),
        (ConfigType.INT, " +7 ", 7),
        (ConfigType.SHORT, "32767", 32767),
        (ConfigType.LONG, "9223372036854775807", 2**63 - 1),
        (ConfigType.DOUBLE, "1.5E3", 1500.0),
        (ConfigType.DOUBLE, ".5", 0.5),
        (ConfigType.LIST, "", []),
        (ConfigType.LIST, " a , b,c ", ["a", "b", "c"]),
        (ConfigType.STRING, " x y ", "x y"),
        (ConfigType.PASSWORD, " secret ", " secret "),
    ],
)
def test_parses_as_config_def_does(type_: ConfigType, text: str, value: ConfigValue) -> None:
    assert key(type_).parse(text) == value


@pytest.mark.parametrize(
    ("type_", "text"),
    [
        (ConfigType.BOOLEAN, "yes"),
        (ConfigType.BOOLEAN, ""),
        (ConfigType.INT, "2147483648"),
        (ConfigType.INT, "1.0"),
        (ConfigType.INT, "0x10"),
        (ConfigType.INT, "1_000"),
        (ConfigType.INT, "٣"),
        (ConfigType.SHORT, "32768"),
        (ConfigType.LONG, "9223372036854775808"),
        (ConfigType.DOUBLE, "much"),
        (ConfigType.DOUBLE, "1e"),
    ],
)
def test_rejects_text_that_is_not_of_the_type(type_: ConfigType, text: str) -> None:
    with pytest.raises(ConfigError, match=r"some\.key"):
        key(type_).parse(text)


REPLICAS = "leader.replication.throttled.replicas"


@pytest.mark.parametrize(
    ("name", "text", "problem"),
    [
        ("retention.ms", "abc", "Invalid value abc for configuration retention.ms: Not a number of type LONG"),
        (
            "max.message.bytes",
            "99999999999",
            "Invalid value 99999999999 for configuration max.message.bytes: Not a number of type INT",
        ),
        (
            "min.cleanable.dirty.ratio",
            "x",
            "Invalid value x for configuration min.cleanable.dirty.ratio: Not a number of type DOUBLE",
        ),
        (
            "unclean.leader.election.enable",
            "maybe",
            "Invalid value maybe for configuration unclean.leader.election.enable: "
            "Expected value to be either true or false",
        ),
        (
            "min.insync.replicas",
            "0",
            "Invalid value 0 for configuration min.insync.replicas: Value must be at least 1",
        ),
        (
            "min.cleanable.dirty.ratio",
            "1.5",
            "Invalid value 1.5 for configuration min.cleanable.dirty.ratio: Value must be no more than 1",
        ),
        (
            "compression.gzip.level",
            "0",
            "Invalid value 0 for configuration compression.gzip.level: Value must be between 1 and 9 or equal to -1",
        ),
        (
            "message.timestamp.type",
            "x",
            "Invalid value x for configuration message.timestamp.type: "
            "String must be one of: CreateTime, LogAppendTime",
        ),
        (
            "cleanup.policy",
            "compact,foo",
            "Invalid value foo for configuration cleanup.policy: String must be one of: compact, delete",
        ),
        (
            REPLICAS,
            "x",
            f"Invalid value x for configuration {REPLICAS}: not an allowed value; allowed: "
            "comma-separated list, [partitionId]:[brokerId],... or *",
        ),
    ],
)
def test_errors_have_kafkas_words(name: str, text: str, problem: str) -> None:
    """The texts of Kafka 4.4.0. The text about throttled replicas is our own."""
    with pytest.raises(ConfigError) as caught:
        TOPIC_KEYS[name].parse(text)
    assert str(caught.value) == problem


def test_error_of_a_word_in_any_case() -> None:
    with pytest.raises(ConfigError, match=r"x .*: String must be one of \(case insensitive\): DISABLED, DOWNGRADE"):
        BROKER_KEYS["group.consumer.migration.policy"].parse("x")


def test_error_hides_a_password() -> None:
    secret = ConfigKey("p", ConfigType.PASSWORD, None, one_of(["right"]))
    with pytest.raises(ConfigError) as caught:
        secret.parse("wrong")
    assert "wrong" not in str(caught.value)


def test_range_with_a_value_outside_of_it() -> None:
    levels = in_range(1, 9, also=-1)
    assert [level for level in range(-2, 11) if levels.allows(level)] == [-1, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert levels.text == "[1,...,9] or -1"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.5, "0.5"),
        (1.0, "1.0"),
        (0.0, "0.0"),
        (0.001, "0.001"),
        (0.0001, "1.0E-4"),
        (1234567.0, "1234567.0"),
        (1e7, "1.0E7"),
        (1.5e10, "1.5E10"),
        (1.7976931348623157e308, "1.7976931348623157E308"),
    ],
)
def test_prints_doubles_as_java_does(value: float, text: str) -> None:
    assert java_double(value) == text


def test_prints_other_values_as_config_def_does() -> None:
    assert value_to_string(None) is None
    assert value_to_string(True) == "true"
    assert value_to_string(["a", "b"]) == "a,b"
    assert value_to_string([]) == ""
    assert value_to_string(12) == "12"


@pytest.mark.parametrize("keys", [BROKER_KEYS, TOPIC_KEYS, GROUP_KEYS])
def test_every_default_is_allowed_and_can_be_printed_and_read_again(keys: dict[str, ConfigKey]) -> None:
    for config_key in keys.values():
        text = value_to_string(config_key.default)
        if text is not None:
            assert config_key.parse(text) == config_key.default, config_key.name
        assert config_key.doc
        assert config_key.doc.endswith("."), config_key.name


def test_numbers_of_keys() -> None:
    """Kafka 4.3.1 has 360 broker keys, 34 topic keys and 17 group keys. 4.4.0 has 19, 4 and 10 more.

    Three more broker keys exist only as dynamic configs. Two are keys of Kafka's authorizer, and two are its system
    properties.
    """
    for release, brokers, groups, topics in (("4.3", 360 + 7, 17, 34), ("4.4", 379 + 7, 27, 38)):
        config = BrokerConfig.from_properties({"kcoord.release": release})
        for keys, count in ((BROKER_KEYS, brokers), (GROUP_KEYS, groups), (TOPIC_KEYS, topics)):
            kafkas = [key for key in keys.values() if not key.name.startswith("kcoord.")]
            assert sum(config.has_key(key) for key in kafkas) == count


@pytest.mark.parametrize(("table", "keys"), [("broker-configs.tsv", BROKER_KEYS), ("group-configs.tsv", GROUP_KEYS)])
def test_keys_are_those_of_kafka_4_4(table: str, keys: dict[str, ConfigKey]) -> None:
    for line in shared("kafka-facts-4.4.0", table).read_text().splitlines():
        name, type_, default, _, importance = line.split("\t")
        key = keys[name]
        printed = f"[{','.join(key.default)}]" if isinstance(key.default, list) else value_to_string(key.default)
        assert (key.type.name, key.importance.name) == (type_, importance), name
        if key.first_release == "4.4":
            assert default == ("null" if printed is None else printed), name
