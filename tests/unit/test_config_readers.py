# SPDX-License-Identifier: Apache-2.0
"""No key is promised that nothing reads: the syntax trees of the broker's modules are searched for readers of each key.

A reader is an expression, not a mention in a comment, a text or a table: an attribute of a configuration
(`config.num_partitions`), or the key as the argument of a lookup or as a subscript (`config.value("num.partitions")`).
Checks at the start do not count, since a value that is only checked has no effect.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import kcoord
from kcoord.config import (
    BROKER_KEYS,
    GROUP_KEYS,
    TOPIC_CONFIG_SYNONYMS,
    TOPIC_KEYS,
    BrokerConfig,
    ConfigError,
    ConfigKey,
    check_topic_configs,
)

PACKAGE = Path(kcoord.__file__).parent
PARTS_OF_THE_BROKER = ("config", "coordinator", "metadata", "runtime", "server", "storage", "topics")
CONFIGS = {"config", "_config", "broker_config", "broker", "_broker"}
"""What a BrokerConfig, TopicConfig or GroupConfig is called where it is read."""
LOOKUPS = {"value", "static_value", "get"}
"""Methods that take the name of a key."""
REFUSED_TOPIC_KEYS = {"remote.storage.enable"}
"""Keys whose effect is that no other value is accepted."""

Sources = Mapping[str, str]


def sources_of_the_broker() -> dict[str, str]:
    """By path; without the tables of keys, and without the checks between them."""
    return {
        str(path.relative_to(PACKAGE)): path.read_text()
        for part in PARTS_OF_THE_BROKER
        for path in sorted((PACKAGE / part).rglob("*.py"))
        if not path.match("config/*_keys.py") and not path.match("config/checks.py")
    }


def name_of(expression: ast.expr) -> str:
    """`config` for `config`, `self.config` and `broker.config`, `resolve` for `TopicConfig.resolve(...)`."""
    if isinstance(expression, ast.Call):
        return name_of(expression.func)
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def constants_of(module: ast.Module) -> dict[str, str]:
    """Texts that the module gives a name."""
    constants: dict[str, str] = {}
    for node in module.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        text = getattr(node, "value", None)
        if isinstance(targets[0], ast.Name) and isinstance(text, ast.Constant) and isinstance(text.value, str):
            constants[targets[0].id] = text.value
    return constants


def readers_in(tree: ast.AST, constants: Mapping[str, str]) -> Iterator[str]:
    """Names of keys and of their attributes that the code reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "check_topic_configs":
            continue
        if isinstance(node, ast.ClassDef) and node.name in ("BrokerConfig", "TopicConfig"):
            for part in ast.walk(node):
                yield from attributes_of(part, {"self"})
        yield from readers_in(node, constants)
    yield from attributes_of(tree, {"resolve", *CONFIGS})
    if isinstance(tree, ast.Call) and isinstance(tree.func, ast.Attribute) and tree.func.attr in LOOKUPS:
        for argument in tree.args:
            if isinstance(argument, ast.Constant):
                yield str(argument.value)
            elif isinstance(argument, ast.Name):
                yield constants.get(argument.id, argument.id)
    if isinstance(tree, ast.Subscript) and isinstance(tree.ctx, ast.Load) and isinstance(tree.slice, ast.Constant):
        yield str(tree.slice.value)


def attributes_of(node: ast.AST, owners: set[str]) -> Iterator[str]:
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and name_of(node.value) in owners:
        yield node.attr


@functools.cache
def names_read_in(source: str) -> set[str]:
    module = ast.parse(source)
    return set(readers_in(module, constants_of(module)))


def read_names(sources: Sources) -> set[str]:
    return {name for source in sources.values() for name in names_read_in(source)}


def is_read(key: ConfigKey, names: set[str]) -> bool:
    return key.name in names or key.attribute in names


def keys_without_reader(sources: Sources) -> list[str]:
    """Keys that are documented as working and read by nothing. A broker key may be the default of a topic key."""
    names = read_names(sources)
    topic = {name for name, key in TOPIC_KEYS.items() if is_read(key, names) or name in REFUSED_TOPIC_KEYS}
    defaults = {broker_key for name in topic for broker_key, _ in TOPIC_CONFIG_SYNONYMS.get(name, ())}
    broker = {name for name, key in BROKER_KEYS.items() if is_read(key, names)} | defaults
    group = {name for name, key in GROUP_KEYS.items() if is_read(key, names)}
    return [
        f"{kind}: {name}"
        for kind, keys, read in (
            ("broker", BROKER_KEYS, broker),
            ("topic", TOPIC_KEYS, topic),
            ("group", GROUP_KEYS, group),
        )
        for name, key in keys.items()
        if key.honoured and name not in read
    ]


def test_every_key_that_works_is_read() -> None:
    assert keys_without_reader(sources_of_the_broker()) == []


def test_a_key_without_effect_is_read_by_nothing() -> None:
    names = read_names(sources_of_the_broker())
    topic_keys = [name for name, key in TOPIC_KEYS.items() if not key.honoured and key.attribute in names]
    broker_keys = [name for name, key in BROKER_KEYS.items() if not key.honoured and key.attribute in names]
    assert (broker_keys, topic_keys) == ([], [])


@pytest.mark.parametrize("keys", [BROKER_KEYS, TOPIC_KEYS, GROUP_KEYS], ids=["broker", "topic", "group"])
def test_a_key_without_effect_says_so_where_it_is_described(keys: Mapping[str, ConfigKey]) -> None:
    assert [name for name, key in keys.items() if not key.honoured and "without effect" not in key.doc] == []


def kept_from_the_start(sources: Sources) -> set[str]:
    """Attributes of configurations that objects read when they are made."""
    return {
        name
        for source in sources.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == "__init__"
        for part in ast.walk(node)
        for name in attributes_of(part, CONFIGS)
    }


def test_dynamic_keys_are_read_when_they_are_needed() -> None:
    """What an object keeps from its making does not change while the broker runs."""
    kept = kept_from_the_start(sources_of_the_broker())
    assert "socket_request_max_bytes" in kept
    assert [name for name, key in BROKER_KEYS.items() if key.dynamic and key.honoured and key.attribute in kept] == []


def test_tiered_storage_is_refused() -> None:
    for name in REFUSED_TOPIC_KEYS:
        with pytest.raises(ConfigError, match=name):
            check_topic_configs(BrokerConfig.from_properties({}), {name: "true"})


@pytest.mark.parametrize(
    ("path", "reader", "unread"),
    [
        ("server/net/listener.py", "config.socket_listen_backlog_size", "broker: socket.listen.backlog.size"),
        ("config/security.py", "config.authorizer_class_name", "broker: authorizer.class.name"),
        ("topics/partition.py", "config.flush_messages", "topic: flush.messages"),
        ("topics/partition.py", "config.flush_messages", "broker: log.flush.interval.messages"),
        (
            "coordinator/group/consumer/settings.py",
            'self._own.get("consumer.session.timeout.ms")',
            "group: consumer.session.timeout.ms",
        ),
    ],
)
def test_a_reader_that_goes_is_missed(path: str, reader: str, unread: str) -> None:
    sources = sources_of_the_broker()
    assert reader in sources[path]
    sources[path] = re.sub(rf"[\w.]*{re.escape(reader)}", "None", sources[path]) + f"\n# {reader}\n"
    assert unread in keys_without_reader(sources)


def test_a_mention_is_no_reader() -> None:
    mention = '"""num.partitions"""\n# config.num_partitions\nNAMES = ("num.partitions",)\nconfig.num_partitions = 1\n'
    assert not is_read(BROKER_KEYS["num.partitions"], read_names({"x.py": mention}))
    assert is_read(BROKER_KEYS["num.partitions"], read_names({"x.py": "print(self._config.num_partitions)"}))
    assert is_read(BROKER_KEYS["num.partitions"], read_names({"x.py": 'config.value("num.partitions")'}))
