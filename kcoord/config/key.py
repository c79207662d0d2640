# SPDX-License-Identifier: Apache-2.0
"""A configuration key: name, type, default and allowed values. Texts are parsed and printed as in Kafka's ConfigDef.

`keys` has the tables of all keys. The other modules of this package are typed views of checked values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import TypeAlias

ConfigValue: TypeAlias = bool | int | float | str | list[str] | None


class ConfigError(ValueError):
    """A configuration value that cannot be used. The text names the key, the value and the problem, as Kafka does."""


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
    """Whether a broker key may be changed while the broker runs, for one broker or only for all brokers."""

    READ_ONLY = 0
    PER_BROKER = 1
    CLUSTER_WIDE = 2


class Importance(IntEnum):
    """Kafka's importance of a key. The documentation of the keys shows it."""

    HIGH = 0
    MEDIUM = 1
    LOW = 2


class Effect(Enum):
    """The effect of a value that is not the default."""

    EFFECTIVE = auto()
    REFUSED = auto()
    """Only the default is allowed."""
    NONE = auto()
    """Values are checked and kept, but have no effect here."""


@dataclass(slots=True, frozen=True)
class Validator:
    """The allowed values of a type: `text` describes them.

    `explain` returns the wrong value, or the wrong entry of a list, and the problem in Kafka's words.
    """

    text: str
    allows: Callable[[ConfigValue], bool]
    explain: Callable[[ConfigValue], tuple[ConfigValue, str]] | None = None


def in_range(lowest: float | None, highest: float | None, also: float | None = None) -> Validator:
    """Allows numbers of the range, and the value `also` outside of the range, such as -1 for "default level"."""

    def allows(value: ConfigValue) -> bool:
        assert isinstance(value, (int, float))
        if value == also:
            return True
        return (lowest is None or value >= lowest) and (highest is None or value <= highest)

    def explain(value: ConfigValue) -> tuple[ConfigValue, str]:
        assert isinstance(value, (int, float))
        if also is not None:
            limits = f"at least {lowest}" if highest is None else f"between {lowest} and {highest}"
            return value, f"Value must be {limits} or equal to {also}"
        if lowest is not None and value < lowest:
            return value, f"Value must be at least {lowest}"
        return value, f"Value must be no more than {highest}"

    low = "" if lowest is None else f"{lowest},"
    high = "" if highest is None else f",{highest}"
    return Validator(f"[{low}...{high}]" + ("" if also is None else f" or {also}"), allows, explain)


def one_of(values: Sequence[str]) -> Validator:
    """Allows the given values only."""
    text = ", ".join(values)
    return Validator(
        f"[{text}]", lambda value: str(value) in values, lambda value: (value, f"String must be one of: {text}")
    )


def one_of_ignoring_case(values: Sequence[str]) -> Validator:
    """Allows the given values, in upper or lower case."""
    lowered = [value.lower() for value in values]
    text = ", ".join(values)
    return Validator(
        f"(case insensitive) [{text}]",
        lambda value: str(value).lower() in lowered,
        lambda value: (value, f"String must be one of (case insensitive): {text}"),
    )


def list_of(values: Sequence[str]) -> Validator:
    """Allows lists whose entries are among `values`."""
    text = ", ".join(values)

    def wrong(value: ConfigValue) -> list[str]:
        assert isinstance(value, list)
        return [entry for entry in value if entry not in values]

    return Validator(
        f"values from [{text}]",
        lambda value: not wrong(value),
        lambda value: (wrong(value)[0], f"String must be one of: {text}"),
    )


def matching(pattern: str, text: str) -> Validator:
    """Allows a text, or a list of texts, that matches a regular expression; `text` describes it to people."""

    def allows(value: ConfigValue) -> bool:
        entries = value if isinstance(value, list) else [str(value)]
        return all(re.fullmatch(pattern, entry) for entry in entries)

    return Validator(text, allows)


@dataclass(slots=True, frozen=True)
class ConfigKey:
    """A key. `first_release` is the first release of Kafka that has it."""

    name: str
    type: ConfigType
    default: ConfigValue
    validator: Validator | None = None
    importance: Importance = Importance.MEDIUM
    doc: str = ""
    update_mode: UpdateMode = UpdateMode.READ_ONLY
    internal: bool = False
    effect: Effect = Effect.EFFECTIVE
    first_release: str = "4.3"
    """The first release of Kafka that has the key, among the values of `kcoord.release`."""
    same_for_all_workers: bool = False
    """True for keys that must be equal in all workers, or that define the workers."""
    synonyms: tuple[tuple[str, int], ...] = ()
    """Broker keys that give a topic key its default. The first key that is set counts; the factor converts its unit."""

    @property
    def attribute(self) -> str:
        """The name of the key's attribute in the typed views."""
        return self.name.replace(".", "_")

    @property
    def dynamic(self) -> bool:
        """True if requests can change the value while the broker runs."""
        return self.update_mode is not UpdateMode.READ_ONLY

    @property
    def sensitive(self) -> bool:
        """True if responses and logs must not show the value."""
        return self.type is ConfigType.PASSWORD

    def parse(self, text: str | None) -> ConfigValue:
        """Returns the checked value of `text`; raises ConfigError."""
        if text is None:
            if self.default is not None:
                raise self._error(text, f"a value is required; allowed: {self.allowed}")
            return None
        try:
            value = parse_value(self.type, text)
        except ValueError:
            if self.type is ConfigType.BOOLEAN:
                raise self._error(text, "Expected value to be either true or false") from None
            raise self._error(text, f"Not a number of type {self.type.name}") from None
        if self.validator is not None and not self.validator.allows(value):
            if self.validator.explain is None:
                raise self._error(text, f"not an allowed value; allowed: {self.allowed}")
            wrong, problem = self.validator.explain(value)
            raise self._error(value_to_string(wrong), problem)
        return value

    def _error(self, text: str | None, problem: str) -> ConfigError:
        shown = "[hidden]" if self.sensitive else text
        return ConfigError(f"Invalid value {shown} for configuration {self.name}: {problem}")

    @property
    def allowed(self) -> str:
        """The allowed values as a text, for error messages and the documentation."""
        word = _TYPE_WORDS[self.type]
        return word if self.validator is None else f"{word}, {self.validator.text}"


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


def parse_value(kind: ConfigType, text: str) -> ConfigValue:
    """Returns the value of `text`; raises ValueError if `text` is not a value of the type."""
    return _PARSERS[kind](text if kind is ConfigType.PASSWORD else text.strip())


def value_to_string(value: ConfigValue) -> str | None:
    """Returns a value as DescribeConfigs prints it, in the form of Java's ConfigDef."""
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
    """Returns the text of Java's Double.toString: scientific notation outside 1e-3 ... 1e7, always a fraction digit."""
    if value == 0 or 1e-3 <= abs(value) < 1e7:
        text = format(value, "f") if "e" in repr(value) else repr(value)
        return text if "." in text else text + ".0"
    digits = re.sub(r"[^0-9]", "", repr(value).partition("e")[0]).strip("0")
    mantissa, _, exponent = format(value, f".{max(len(digits) - 1, 1)}e").partition("e")
    return f"{mantissa}E{int(exponent)}"
