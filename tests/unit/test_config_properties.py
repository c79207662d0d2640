# SPDX-License-Identifier: Apache-2.0
"""The syntax of java.util.Properties, environment variables, overrides, and their precedence."""

from __future__ import annotations

import pytest

from kcoord.config import BROKER_KEYS, BrokerConfig, ConfigError, merge_properties, parse_properties
from kcoord.config.properties import environment_properties, override_properties


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a=1", {"a": "1"}),
        ("a = 1 ", {"a": "1 "}),
        ("a:1", {"a": "1"}),
        ("a 1", {"a": "1"}),
        ("a\t\f = \t1", {"a": "1"}),
        ("a==1", {"a": "=1"}),
        ("a : = 1", {"a": "= 1"}),
        ("a", {"a": ""}),
        ("  # comment\n! comment\n\n   \na=1", {"a": "1"}),
        ("a=1#2", {"a": "1#2"}),
        ("a=1,\\\n   2,\\\n\t3", {"a": "1,2,3"}),
        ("a=1\\\n# no comment", {"a": "1# no comment"}),
        ("a=1\\\\\nb=2", {"a": "1\\", "b": "2"}),
        ("a=1\\", {"a": "1"}),
        ("a\\ b\\=c\\:d=1", {"a b=c:d": "1"}),
        ("a=\\t\\n\\r\\f\\\\\\x", {"a": "\t\n\r\f\\x"}),
        ("a=\\u00e9\\u20AC", {"a": "é€"}),
        ("a=\\ud83d\\ude00", {"a": "\U0001f600"}),
        ("a=1\r\nb=2\rc=3", {"a": "1", "b": "2", "c": "3"}),
        ("a=1\na=2", {"a": "2"}),
        ("=1", {"": "1"}),
        ("", {}),
    ],
)
def test_syntax(text: str, expected: dict[str, str]) -> None:
    assert parse_properties(text) == expected


@pytest.mark.parametrize("text", ["a=\\u12x4", "a=\\u12", "a=\\u 12b", "a=\\u1_23"])
def test_bad_unicode_escape(text: str) -> None:
    with pytest.raises(ConfigError, match="uxxxx"):
        parse_properties(text)


def test_environment() -> None:
    environ = {
        "KCOORD_GROUP_CONSUMER_SESSION_TIMEOUT_MS": "46000",
        "KCOORD_LOG_FLUSH_POLICY": "os",
        "KCOORD_KCOORD_KIP1327_ENABLE": "false",
        "KCOORD_": "x",
        "HOME": "/root",
    }
    assert environment_properties(environ, BROKER_KEYS) == {
        "group.consumer.session.timeout.ms": "46000",
        "kcoord.log.flush.policy": "os",
        "kcoord.kip1327.enable": "false",
    }


def test_overrides() -> None:
    assert override_properties(["a=1", " b = x=y "]) == {"a": "1", "b": "x=y"}
    for bad in ("a", "=1"):
        with pytest.raises(ConfigError, match="key=value"):
            override_properties([bad])


def test_precedence() -> None:
    text = "num.partitions=2\nnode.id=2\nmax.connections=2"
    environ = {"KCOORD_NUM_PARTITIONS": "3", "KCOORD_NODE_ID": "3"}
    config = BrokerConfig.from_properties(merge_properties(text, environ, ["num.partitions=4"], BROKER_KEYS))
    assert (config.num_partitions, config.node_id, config.max_connections) == (4, 3, 2)
    assert config.socket_listen_backlog_size == 4096
