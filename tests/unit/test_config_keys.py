# SPDX-License-Identifier: Apache-2.0
"""The table of configuration keys: the parsing of its lines, and the files that are made from it."""

from __future__ import annotations

import re
import typing
from collections.abc import Mapping
from pathlib import Path

import pytest

from kcoord.config import (
    BROKER_KEYS,
    CLIENT_METRICS_KEYS,
    GROUP_KEYS,
    TOPIC_KEYS,
    BrokerConfig,
    ConfigKey,
    ConfigType,
    Effect,
    GroupConfig,
    TopicConfig,
    UpdateMode,
    check_group_configs,
    keys,
    value_to_string,
)
from kcoord.config.key import Importance

TABLES = {"broker": BROKER_KEYS, "topic": TOPIC_KEYS, "group": GROUP_KEYS, "client metrics": CLIENT_METRICS_KEYS}
SOURCE = Path(keys.__file__).with_name("keys.txt").read_text()
PYTHON_TYPES = {
    ConfigType.BOOLEAN: bool,
    ConfigType.INT: int,
    ConfigType.SHORT: int,
    ConfigType.LONG: int,
    ConfigType.DOUBLE: float,
    ConfigType.LIST: list[str],
}


def read(line: str, section: str = "[broker]") -> ConfigKey:
    (key,) = keys.read_tables(f"{section}\n{line}\n")["broker"].values()
    return key


def test_a_line_with_everything() -> None:
    line = "a.b | long | 5 | 1..9 or -1 | high cluster-wide internal since-4.4 all-workers no-effect | c, d.e * 60"
    key = read(f"{line}\n    Some text | of two lines,\n    see [c].")
    assert key.validator is not None
    assert key == ConfigKey(
        "a.b",
        ConfigType.LONG,
        5,
        key.validator,
        Importance.HIGH,
        "Some text | of two lines, see [c].",
        UpdateMode.CLUSTER_WIDE,
        internal=True,
        effect=Effect.NONE,
        first_release="4.4",
        same_for_all_workers=True,
        synonyms=(("c", 1), ("d.e", 60)),
    )


def test_a_line_with_the_least_columns() -> None:
    assert read("a | string | null | | low") == ConfigKey("a", ConfigType.STRING, None, importance=Importance.LOW)


def test_a_section_has_a_text_for_keys_without_effect() -> None:
    section = "[broker] Does nothing."
    assert read("a | string | | | low no-effect", section).doc == "Does nothing."
    assert read("a | string | | | low no-effect\n    Because.", section).doc == "Because."
    assert read("a | string | | | low", section).doc == ""


@pytest.mark.parametrize(
    ("type_", "allowed", "text", "usable", "refused", "problem"),
    [
        ("int", "2..", "[2,...]", "2", "1", "Value must be at least 2"),
        ("int", "..2", "[...,2]", "-5", "3", "Value must be no more than 2"),
        ("double", "0..0.5", "[0,...,0.5]", "0.5", "0.51", "Value must be no more than 0.5"),
        ("int", "1.. or -1", "[1,...] or -1", "-1", "0", "Value must be at least 1 or equal to -1"),
        ("int", "1..9 or -1", "[1,...,9] or -1", "-1", "0", "Value must be between 1 and 9 or equal to -1"),
        ("string", "a b", "[a, b]", "a", "A", "String must be one of: a, b"),
        (
            "string",
            "any-case a b",
            "(case insensitive) [a, b]",
            "B",
            "c",
            "String must be one of (case insensitive): a, b",
        ),
        (
            "list",
            "a b",
            "values from [a, b]",
            "",
            "a,c",
            "Invalid value c for configuration a: String must be one of: a, b",
        ),
        ("list", "<at-least-one>", "any values, at least one", "x", "", "allowed: comma-separated list, any values"),
        ("string", "<url>", "an http or https URL, or empty", "", "ftp://x", "allowed: string, an http or https URL"),
    ],
)
def test_allowed_values(type_: str, allowed: str, text: str, usable: str, refused: str, problem: str) -> None:
    key = read(f"a | {type_} | null | {allowed} | low")
    assert key.validator is not None
    assert key.validator.text == text
    key.parse(usable)
    with pytest.raises(ValueError, match=re.escape(problem)):
        key.parse(refused)


@pytest.mark.parametrize(
    "line",
    [
        "a | int | 5 | 1..",
        "a | number | 5 | | low",
        "a | int | five | | low",
        "a | int | 5 | | low dynamic",
        "a | int | 5 | | low | b * x",
        "a | int | 5 | 1..x | low",
        "a | int | 5 | 1.. or | low",
        "a | int | 5 | <even> | low",
    ],
)
def test_the_error_names_a_line_that_is_wrong(line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(repr(line))):
        read(line)


@pytest.mark.parametrize("section", TABLES)
def test_keys_are_unique_and_in_alphabetical_order(section: str) -> None:
    lines = SOURCE.partition(f"\n[{section}]")[2].partition("\n[")[0]
    names = re.findall(r"^([a-z][\w.]*) *\|", lines, re.MULTILINE)
    assert names == sorted(set(names))
    assert names == list(TABLES[section])


@pytest.mark.parametrize("section", TABLES)
def test_defaults_are_allowed(section: str) -> None:
    for key in TABLES[section].values():
        if key.default is not None:
            assert key.parse(value_to_string(key.default)) == key.default, key.name


@pytest.mark.parametrize(
    ("config", "table"), [(BrokerConfig, BROKER_KEYS), (TopicConfig, TOPIC_KEYS), (GroupConfig, GROUP_KEYS)]
)
def test_attributes_are_the_keys_that_work_with_their_types(config: type, table: Mapping[str, ConfigKey]) -> None:
    hints = typing.get_type_hints(config)
    working = {key.attribute: key for key in table.values() if key.effect is not Effect.NONE}
    own = {"explicit", "dynamic", "ignored", "unknown", "of_workers", "values"}
    assert hints.keys() - own == working.keys()
    for name, key in working.items():
        expected = PYTHON_TYPES.get(key.type, str)
        assert hints[name] == (expected if key.default is not None else expected | None), name


def test_every_limit_of_groups_bounds_a_group_key() -> None:
    """The names of limits follow from the group keys. A new limit with another name would bound no key."""
    config = BrokerConfig.from_properties({})
    limits = [name for name in BROKER_KEYS if re.match(r"group\.\w+\.(min|max)\.(?!size$|share\.sessions$)", name)]
    assert len(limits) == 27
    for limit in limits:
        _, kind, bound, setting = limit.split(".", 3)
        value = config.value(limit)
        assert isinstance(value, int)
        beyond = value + (1 if bound == "max" else -1)
        name = next(name for name in GROUP_KEYS if re.fullmatch(rf"{kind}\.(num\.)?{re.escape(setting)}", name))
        with pytest.raises(ValueError, match=re.escape(name)):
            check_group_configs(config, {name: str(beyond)})
