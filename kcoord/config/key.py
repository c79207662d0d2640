# SPDX-License-Identifier: Apache-2.0
"""What one configuration key is: name, type, default, allowed values. Text is read and printed as by Kafka's ConfigDef.

Every other module of this package is a table of ConfigKey objects or a typed view on values that were checked by one.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, TypeAlias

ConfigValue: TypeAlias = bool | int | float | str | list[str] | None

INT_MAX = 2**31 - 1
LONG_MAX = 2**63 - 1
DOUBLE_MAX = 1.7976931348623157e308


class ConfigError(ValueError):
    """A configuration value that cannot be used; the text names the key, the value and what is allowed."""


class ConfigType(IntEnum):
    """Types of configuration values; the numbers are those of DescribeConfigs v3 and later."""

    BOOLEAN = 1
    STRING = 2
    INT = 3
    SHORT = 4
    LONG = 5
    DOUBLE = 6
    LIST = 7
    CLASS = 8
    PASSWORD = 9


class UpdateMode(IntEnum):
    """Where a broker key may be changed while the broker runs."""

    READ_ONLY = 0
    PER_BROKER = 1
    CLUSTER_WIDE = 2


class Importance(IntEnum):
    HIGH = 0
    MEDIUM = 1
    LOW = 2


class Validator(Protocol):
    """Says which values of a type are allowed; `str()` of it is the text for people."""

    def allows(self, value: ConfigValue) -> bool: ...


@dataclass(slots=True, frozen=True)
class Range:
    lowest: float | None = None
    highest: float | None = None
    also: float | None = None
    """One more value outside the range, such as -1 for "default level"."""

    def allows(self, value: ConfigValue) -> bool:
        if value is None or value == self.also:
            return True
        assert isinstance(value, (int, float))
        return (self.lowest is None or value >= self.lowest) and (self.highest is None or value <= self.highest)

    def __str__(self) -> str:
        low = "" if self.lowest is None else f"{self.lowest},"
        high = "" if self.highest is None else f",{self.highest}"
        return f"[{low}...{high}]" + ("" if self.also is None else f" or {self.also}")


@dataclass(slots=True, frozen=True)
class OneOf:
    values: tuple[str, ...]
    ignore_case: bool = False

    def allows(self, value: ConfigValue) -> bool:
        text = str(value)
        return text.lower() in {allowed.lower() for allowed in self.values} if self.ignore_case else text in self.values

    def __str__(self) -> str:
        return ("(case insensitive) " if self.ignore_case else "") + f"[{', '.join(self.values)}]"


@dataclass(slots=True, frozen=True)
class ListOf:
    """A list whose entries are among `values` (any, if `values` is empty)."""

    values: tuple[str, ...] = ()
    allow_empty: bool = True

    def allows(self, value: ConfigValue) -> bool:
        if not isinstance(value, list):
            return value is None
        if not value and not self.allow_empty:
            return False
        return not self.values or all(entry in self.values for entry in value)

    def __str__(self) -> str:
        text = f"values from [{', '.join(self.values)}]" if self.values else "any values"
        return text if self.allow_empty else f"{text}, at least one"


@dataclass(slots=True, frozen=True)
class Matches:
    pattern: str
    description: str

    def allows(self, value: ConfigValue) -> bool:
        entries = value if isinstance(value, list) else [str(value)]
        return value is None or all(re.fullmatch(self.pattern, entry) for entry in entries)

    def __str__(self) -> str:
        return self.description


@dataclass(slots=True, frozen=True)
class DistinctEntries:
    """A list without empty and without repeated entries."""

    def allows(self, value: ConfigValue) -> bool:
        return not isinstance(value, list) or ("" not in value and len(set(value)) == len(value))

    def __str__(self) -> str:
        return "entries that are not empty and must not contain duplicate values"


def at_least(lowest: float) -> Range:
    return Range(lowest=lowest)


def between(lowest: float, highest: float) -> Range:
    return Range(lowest=lowest, highest=highest)


NON_EMPTY = Matches(r"(?s).+", "a non-empty string")


@dataclass(slots=True, frozen=True)
class ConfigKey:
    name: str
    type: ConfigType
    default: ConfigValue
    validator: Validator | None = None
    importance: Importance = Importance.MEDIUM
    doc: str = ""
    update_mode: UpdateMode = UpdateMode.READ_ONLY
    internal: bool = False
    honoured: bool = True
    """False: the key is accepted and checked, but changes nothing here."""
    first_release: str = "4.3"
    """The first release of Kafka that has the key, of those that `kcoord.release` names."""

    @property
    def attribute(self) -> str:
        return self.name.replace(".", "_")

    @property
    def dynamic(self) -> bool:
        return self.update_mode is not UpdateMode.READ_ONLY

    @property
    def sensitive(self) -> bool:
        return self.type is ConfigType.PASSWORD

    def parse(self, text: str | None) -> ConfigValue:
        """The checked value of `text`; ConfigError says what would be allowed."""
        if text is None:
            if self.default is not None:
                raise self._error(text, "a value is needed")
            return None
        try:
            value = _PARSERS[self.type](text if self.type is ConfigType.PASSWORD else text.strip())
        except ValueError:
            raise self._error(text, f"not a {_TYPE_WORDS[self.type]}") from None
        if self.validator is not None and not self.validator.allows(value):
            raise self._error(text, "not an allowed value")
        return value

    def _error(self, text: str | None, problem: str) -> ConfigError:
        shown = "[hidden]" if self.sensitive else text
        return ConfigError(f"Invalid value {shown} for configuration {self.name}: {problem}; allowed: {self.allowed}")

    @property
    def allowed(self) -> str:
        word = _TYPE_WORDS[self.type]
        return word if self.validator is None else f"{word}, {self.validator}"


_TYPE_WORDS: dict[ConfigType, str] = {
    ConfigType.BOOLEAN: "boolean (true or false)",
    ConfigType.STRING: "string",
    ConfigType.INT: "32-bit integer",
    ConfigType.SHORT: "16-bit integer",
    ConfigType.LONG: "64-bit integer",
    ConfigType.DOUBLE: "number",
    ConfigType.LIST: "comma-separated list",
    ConfigType.CLASS: "class name",
    ConfigType.PASSWORD: "password",
}


def _parse_boolean(text: str) -> ConfigValue:
    lowered = text.lower()
    if lowered not in ("true", "false"):
        raise ValueError(text)
    return lowered == "true"


def _parse_integer(text: str, bits: int) -> ConfigValue:
    if not re.fullmatch(r"[+-]?[0-9]{1,20}", text):
        raise ValueError(text)
    value = int(text)
    if not -(1 << bits - 1) <= value < 1 << bits - 1:
        raise ValueError(text)
    return value


def _parse_double(text: str) -> ConfigValue:
    if not re.fullmatch(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?[dDfF]?", text):
        raise ValueError(text)
    return float(text.rstrip("dDfF"))


def _parse_list(text: str) -> ConfigValue:
    return [entry.strip() for entry in text.split(",")] if text else []


_PARSERS: dict[ConfigType, Callable[[str], ConfigValue]] = {
    ConfigType.BOOLEAN: _parse_boolean,
    ConfigType.STRING: str,
    ConfigType.INT: lambda text: _parse_integer(text, 32),
    ConfigType.SHORT: lambda text: _parse_integer(text, 16),
    ConfigType.LONG: lambda text: _parse_integer(text, 64),
    ConfigType.DOUBLE: _parse_double,
    ConfigType.LIST: _parse_list,
    ConfigType.CLASS: str,
    ConfigType.PASSWORD: str,
}


def value_to_string(value: ConfigValue) -> str | None:
    """How DescribeConfigs prints a value: as Java's ConfigDef would."""
    if value is None:
        return None
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return java_double(value)
    if isinstance(value, list):
        return ",".join(value)
    return str(value)


def java_double(value: float) -> str:
    """The text of Java's Double.toString: scientific notation outside 1e-3 ... 1e7, always a fraction digit."""
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        text = format(value, "f") if "e" in repr(value) else repr(value)
        return text if "." in text else text + ".0"
    digits = re.sub(r"[^0-9]", "", repr(value).partition("e")[0]).strip("0")
    mantissa, _, exponent = format(value, f".{max(len(digits) - 1, 1)}e").partition("e")
    return f"{mantissa}E{int(exponent)}"


def key_table(*groups: Iterable[ConfigKey]) -> Mapping[str, ConfigKey]:
    """All keys by name, in alphabetical order."""
    keys = sorted((key for group in groups for key in group), key=lambda key: key.name)
    return {key.name: key for key in keys}
