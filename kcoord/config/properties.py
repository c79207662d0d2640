# SPDX-License-Identifier: Apache-2.0
"""Reads settings: files in the syntax of java.util.Properties, KCOORD_ environment variables and key=value overrides.

A later source wins: defaults < file < environment < overrides.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path

from kcoord.config.key import ConfigError

ENVIRONMENT_PREFIX = "KCOORD_"
_WHITESPACE = " \t\f"
_ESCAPES = {"t": "\t", "n": "\n", "r": "\r", "f": "\f"}


def read_text(path: Path) -> str:
    """Returns the text of a file. Raises ConfigError that names the file if it is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the file is not UTF-8 text: {error}") from None


def parse_properties(text: str) -> dict[str, str]:
    """Parse the text of a properties file; a key given twice keeps its last value."""
    properties: dict[str, str] = {}
    for line in _logical_lines(text):
        key, value = _split(line)
        properties[_unescape(key)] = _unescape(value)
    return properties


def _logical_lines(text: str) -> Iterator[str]:
    """Yields the lines, without comments and blank lines.

    A line that ends in an odd number of backslashes continues on the next line.
    """
    pending: str | None = None
    for natural in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        line = natural.lstrip(_WHITESPACE)
        if pending is None and (not line or line[0] in "#!"):
            continue
        line = (pending or "") + line
        trailing = len(line) - len(line.rstrip("\\"))
        if trailing % 2:
            pending = line[:-1]
            continue
        pending = None
        yield line
    if pending:
        yield pending


def _split(line: str) -> tuple[str, str]:
    """Returns key and value, still escaped. The key ends at the first unescaped `=`, `:` or white space."""
    position = 0
    while position < len(line) and line[position] not in "=: \t\f":
        position += 2 if line[position] == "\\" else 1
    key, rest = line[:position], line[position:].lstrip(_WHITESPACE)
    if rest[:1] in ("=", ":"):
        rest = rest[1:].lstrip(_WHITESPACE)
    return key, rest


def _unescape(text: str) -> str:
    if "\\" not in text:
        return text
    out: list[str] = []
    position = 0
    while position < len(text):
        char = text[position]
        position += 1
        if char != "\\" or position == len(text):
            if char != "\\":
                out.append(char)
            continue
        char = text[position]
        position += 1
        if char == "u":
            digits = text[position : position + 4]
            if not re.fullmatch("[0-9a-fA-F]{4}", digits):
                raise ConfigError(f"Malformed \\uxxxx escape in a properties file: \\u{digits}")
            out.append(chr(int(digits, 16)))
            position += 4
        else:
            out.append(_ESCAPES.get(char, char))
    return "".join(out).encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def environment_properties(environ: Mapping[str, str], known_keys: Container[str] = ()) -> dict[str, str]:
    """Returns the settings in environment variables: KCOORD_GROUP_MAX_SIZE=5 is group.max.size=5.

    The variable of a key `kcoord.KEY` is KCOORD_KEY or KCOORD_KCOORD_KEY.
    """
    properties: dict[str, str] = {}
    for variable, value in sorted(environ.items()):
        if not variable.startswith(ENVIRONMENT_PREFIX) or len(variable) == len(ENVIRONMENT_PREFIX):
            continue
        key = variable[len(ENVIRONMENT_PREFIX) :].lower().replace("_", ".")
        own = f"kcoord.{key}"
        properties[own if key not in known_keys and own in known_keys else key] = value
    return properties


def override_properties(overrides: Iterable[str]) -> dict[str, str]:
    """Returns the settings in `--override key=value` arguments."""
    properties: dict[str, str] = {}
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator or not key.strip():
            raise ConfigError(f"Invalid override {override!r}: it must have the form key=value")
        properties[key.strip()] = value.strip()
    return properties


def merge_properties(
    file_text: str | None, environ: Mapping[str, str], overrides: Iterable[str], known_keys: Container[str] = ()
) -> dict[str, str]:
    """Returns all settings. The later source in the list of the module text wins."""
    properties = parse_properties(file_text) if file_text is not None else {}
    properties.update(environment_properties(environ, known_keys))
    properties.update(override_properties(overrides))
    return properties
