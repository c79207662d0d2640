# SPDX-License-Identifier: Apache-2.0
"""Reads the JSON object of a control request field by field. Every error text names the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar, overload

from kcoord.testing.errors import ControlError

T = TypeVar("T", str, int, bool)


class Arguments:
    """The fields of a request. `text`, `integer` and so on take a field; `end` rejects the fields that are left."""

    def __init__(self, body: object) -> None:
        if body is None:
            body = {}
        if not isinstance(body, Mapping):
            raise ControlError(f"the body must be a JSON object, not {type(body).__name__}")
        self._fields: dict[str, object] = {str(key): value for key, value in body.items()}

    @overload
    def text(self, name: str) -> str: ...

    @overload
    def text(self, name: str, default: None) -> str | None: ...

    def text(self, name: str, default: object = ...) -> str | None:
        return self._take(name, str, "a string", default)

    @overload
    def integer(self, name: str) -> int: ...

    @overload
    def integer(self, name: str, default: int) -> int: ...

    @overload
    def integer(self, name: str, default: None) -> int | None: ...

    def integer(self, name: str, default: object = ...) -> int | None:
        return self._take(name, int, "an integer", default)

    @overload
    def number(self, name: str, default: int) -> int: ...

    @overload
    def number(self, name: str, default: None) -> int | None: ...

    def number(self, name: str, default: int | None) -> int | None:
        """Takes an integer, or a string of digits as in a query string."""
        text = self._fields.get(name)
        if isinstance(text, str):
            if not text.removeprefix("-").isdecimal():
                raise ControlError(f"{name} must be an integer, not {text!r}")
            self._fields[name] = int(text)
        return self._take(name, int, "an integer", default)

    def count(self, name: str, default: int = 0) -> int:
        """Takes an integer that is not negative."""
        value = self.integer(name, default)
        if value < 0:
            raise ControlError(f"{name} must not be negative: {value}")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self._take(name, bool, "true or false", default)
        assert value is not None
        return value

    def mapping(self, name: str) -> dict[str, object]:
        """Takes an object; empty if the field is absent."""
        value = self._fields.pop(name, None)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise ControlError(f"{name} must be an object, not {value!r}")
        return {str(key): item for key, item in value.items()}

    def texts(self, name: str) -> dict[str, str]:
        """Takes an object of strings; numbers and booleans become strings."""
        texts = {}
        for key, value in self.mapping(name).items():
            if not isinstance(value, str | int | float):
                raise ControlError(f"{name}.{key} must be a string, not {value!r}")
            texts[key] = str(value).lower() if isinstance(value, bool) else str(value)
        return texts

    def items(self, name: str) -> list[object]:
        """Takes a list; empty if the field is absent."""
        value = self._fields.pop(name, None)
        if value is None:
            return []
        if not isinstance(value, list):
            raise ControlError(f"{name} must be a list, not {value!r}")
        return value

    def end(self) -> None:
        """Raises ControlError if fields are left. Such fields are usually misspelt."""
        if self._fields:
            raise ControlError(f"unknown fields: {', '.join(sorted(self._fields))}")

    def _take(self, name: str, kind: type[T], title: str, default: object) -> T | None:
        value = self._fields.pop(name, None)
        if value is None:
            if default is ...:
                raise ControlError(f"{name} is missing")
            assert default is None or isinstance(default, kind)
            return default
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise ControlError(f"{name} must be {title}, not {value!r}")
        return value
