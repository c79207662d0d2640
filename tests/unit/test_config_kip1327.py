# SPDX-License-Identifier: Apache-2.0
"""`kcoord.kip1327.revisions`: the form of KIP-1327 for each client."""

from __future__ import annotations

import pytest

from kcoord.config import BrokerConfig, ConfigError, Kip1327Form

KEY = "kcoord.kip1327.revisions"


def config_of(text: str, **more: str) -> BrokerConfig:
    return BrokerConfig.from_properties({KEY: text, **{name.replace("_", "."): value for name, value in more.items()}})


@pytest.mark.parametrize(
    ("name", "form"),
    [
        ("dekaf", "new-partitions"),
        ("apache-kafka-java", "off"),
        ("librdkafka", "off"),
        ("confluent-kafka-python", "off"),
        ("confluent-kafka-go", "off"),
        ("confluent-kafka-dotnet", "off"),
        ("confluent-kafka-javascript", "off"),
        ("kgo", "off"),
        ("sarama", "off"),
        ("kafkajs", "off"),
        ("kafka-python", "off"),
        ("aiokafka", "off"),
        ("kcoord", "creation-time"),
        ("", "creation-time"),
        # The name must match exactly.
        ("Dekaf", "creation-time"),
        ("dekaf2", "creation-time"),
        ("librdkafka-fork", "creation-time"),
    ],
)
def test_the_default(name: str, form: str) -> None:
    assert BrokerConfig.from_properties({}).kip1327_form(name) is Kip1327Form(form)
    assert config_of("*:new-partitions", kcoord_kip1327_enable="false").kip1327_form(name) is Kip1327Form.OFF


@pytest.mark.parametrize(
    ("text", "name", "form"),
    [
        ("a:off,a:creation-time,*:new-partitions", "a", "off"),
        ("*:off,a:creation-time", "a", "off"),
        ("a:off, b:creation-time , *:new-partitions", "b", "creation-time"),
        ("a:off,*:new-partitions", "", "new-partitions"),
        ("a:creation-time", "b", "off"),
        ("a:creation-time", "", "off"),
        ("", "a", "off"),
        ("a-b.c:creation-time", "a-b.c", "creation-time"),
    ],
)
def test_the_first_entry_that_matches_decides(text: str, name: str, form: str) -> None:
    assert config_of(text).kip1327_form(name) is Kip1327Form(form)


@pytest.mark.parametrize(
    "text", ["dekaf", "dekaf:on", ":off", "dekaf:", "*:Off", "a b:off", "-a:off", "*a:off", "a:off,,b:off", "a:b:off"]
)
def test_a_bad_entry_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match=rf"configuration {KEY}: not an allowed value; allowed: .*software-name:form"):
        config_of(text)
