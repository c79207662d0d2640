# SPDX-License-Identifier: Apache-2.0
"""Every documented key has a reader. The tests search the syntax trees of the broker's modules for readers of each key.

A reader is an expression, not a mention in a comment, a text or a table: an attribute of a configuration
(`config.num_partitions`), or the key as the argument of a lookup or as a subscript (`config.value("num.partitions")`).
Checks at the start do not count, since a value that is only checked has no effect. Refused keys are for such values.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import kcoord
from kcoord.client.security_properties import SECURITY_PROTOCOL, is_used
from kcoord.config import (
    BROKER_KEYS,
    GROUP_KEYS,
    TOPIC_KEYS,
    BrokerConfig,
    ConfigError,
    ConfigKey,
    ConfigType,
    Effect,
    check_topic_configs,
    value_to_string,
)
from kcoord.config.upstream import UPSTREAM_PREFIX

PACKAGE = Path(kcoord.__file__).parent
PARTS_OF_THE_BROKER = (
    "config",
    "coordinator",
    "metadata",
    "runtime",
    "security",
    "server",
    "storage",
    "topics",
    "upstream",
)
CONFIGS = {"config", "_config", "broker_config", "broker", "_broker"}
"""The names of variables that hold a BrokerConfig, TopicConfig or GroupConfig."""
LOOKUPS = {"entries", "get", "text", "value", "value_for_listener"}
"""Methods and functions that take the name of a key."""
CHECKS = ("config/checks.py", "config/security.py", "config/upstream.py")
"""The checks at the start. A value that is only checked has no effect."""
BEARER = {"sasl.mechanism": "OAUTHBEARER"}
ALL_KEYS = [*BROKER_KEYS.values(), *TOPIC_KEYS.values(), *GROUP_KEYS.values()]

Sources = Mapping[str, str]


def sources_of_the_broker() -> dict[str, str]:
    """Returns the sources by path, without the checks."""
    return {
        str(path.relative_to(PACKAGE)): path.read_text()
        for part in PARTS_OF_THE_BROKER
        for path in sorted((PACKAGE / part).rglob("*.py"))
        if not any(path.match(check) for check in CHECKS)
    }


def name_of(expression: ast.expr) -> str:
    """Returns `config` for `config`, `self.config` and `broker.config`; `resolve` for `TopicConfig.resolve(...)`."""
    if isinstance(expression, ast.Call):
        return name_of(expression.func)
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def constants_of(module: ast.Module) -> dict[str, str]:
    """Returns the texts that are constants of the module, by name."""
    constants: dict[str, str] = {}
    for node in module.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        text = getattr(node, "value", None)
        if isinstance(targets[0], ast.Name) and isinstance(text, ast.Constant) and isinstance(text.value, str):
            constants[targets[0].id] = text.value
    return constants


def readers_in(tree: ast.AST, constants: Mapping[str, str]) -> Iterator[str]:
    """Yields the names of keys, and of their attributes, that the code reads."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef) and node.name == "check_topic_configs":
            continue
        if isinstance(node, ast.ClassDef) and node.name in ("BrokerSettings", "TopicConfig"):
            for part in ast.walk(node):
                yield from attributes_of(part, {"self"})
        yield from readers_in(node, constants)
    yield from attributes_of(tree, {"resolve", *CONFIGS})
    if isinstance(tree, ast.Call) and name_of(tree.func) in LOOKUPS:
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
    # The client reads security settings by their names without the prefix.
    own_name = key.name.removeprefix(UPSTREAM_PREFIX)
    of_client = own_name != key.name and (own_name == SECURITY_PROTOCOL or is_used(own_name, BEARER))
    return key.name in names or key.attribute in names or of_client


def keys_without_reader(sources: Sources) -> list[str]:
    """Returns the effective keys that no code reads. A broker key also counts as read as the default of a topic key."""
    names = read_names(sources)
    topic = {name for name, key in TOPIC_KEYS.items() if is_read(key, names)}
    defaults = {broker_key for name in topic for broker_key, _ in TOPIC_KEYS[name].synonyms}
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
        if key.effect is Effect.EFFECTIVE and name not in read
    ]


def test_every_effective_key_is_read() -> None:
    assert keys_without_reader(sources_of_the_broker()) == []


def test_no_code_reads_a_key_without_effect() -> None:
    names = read_names(sources_of_the_broker())
    assert [key.name for key in ALL_KEYS if key.effect is not Effect.EFFECTIVE and key.attribute in names] == []


def test_the_text_of_a_key_without_effect_says_so() -> None:
    inert = [key for key in ALL_KEYS if key.effect is Effect.NONE]
    assert [key.name for key in inert if "without effect" not in key.doc] == []


def makes_objects(function: ast.FunctionDef) -> bool:
    return function.name == "__init__" or any(
        name_of(decorator) == "classmethod" for decorator in function.decorator_list
    )


def kept_from_the_start(sources: Sources) -> set[str]:
    """Returns the attributes of configurations that constructors read."""
    return {
        name
        for source in sources.values()
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and makes_objects(node)
        for part in ast.walk(node)
        for name in attributes_of(part, CONFIGS)
    }


def test_dynamic_keys_are_read_when_they_are_needed() -> None:
    """A value that a constructor reads does not change while the broker runs."""
    kept = kept_from_the_start(sources_of_the_broker())
    assert "socket_request_max_bytes" in kept
    effective = [key for key in BROKER_KEYS.values() if key.effect is Effect.EFFECTIVE]
    assert [key.name for key in effective if key.dynamic and key.attribute in kept] == []


@pytest.mark.parametrize("key", [key for key in ALL_KEYS if key.effect is Effect.REFUSED], ids=lambda key: key.name)
def test_a_refused_key_allows_only_its_default(key: ConfigKey) -> None:
    config = BrokerConfig.from_properties({})
    default, value = value_to_string(key.default) or "", "true" if key.type is ConfigType.BOOLEAN else "some.Class"
    if key.name in TOPIC_KEYS:
        check_topic_configs(config, {key.name: default})
        with pytest.raises(ConfigError, match="Tiered Storage functionality is disabled in the broker"):
            check_topic_configs(config, {key.name: value})
    else:
        BrokerConfig.from_properties({key.name: default})
        with pytest.raises(ConfigError, match=re.escape(f"Invalid value {value} for configuration {key.name}: ")):
            BrokerConfig.from_properties({key.name: value})


@pytest.mark.parametrize(
    ("path", "reader", "unread"),
    [
        ("server/net/listener.py", "config.socket_listen_backlog_size", "broker: socket.listen.backlog.size"),
        ("topics/partition.py", "config.flush_messages", "topic: flush.messages"),
        ("topics/partition.py", "config.flush_messages", "broker: log.flush.interval.messages"),
        (
            "coordinator/group/consumer/group.py",
            'self._own.get("consumer.session.timeout.ms")',
            "group: consumer.session.timeout.ms",
        ),
    ],
)
def test_a_removed_reader_is_detected(path: str, reader: str, unread: str) -> None:
    sources = sources_of_the_broker()
    assert reader in sources[path]
    sources[path] = re.sub(rf"[\w.]*{re.escape(reader)}", "None", sources[path]) + f"\n# {reader}\n"
    assert unread in keys_without_reader(sources)


def test_a_mention_is_not_a_reader() -> None:
    mention = '"""num.partitions"""\n# config.num_partitions\nNAMES = ("num.partitions",)\nconfig.num_partitions = 1\n'
    assert not is_read(BROKER_KEYS["num.partitions"], read_names({"x.py": mention}))
    assert is_read(BROKER_KEYS["num.partitions"], read_names({"x.py": "print(self._config.num_partitions)"}))
    assert is_read(BROKER_KEYS["num.partitions"], read_names({"x.py": 'config.value("num.partitions")'}))
