# SPDX-License-Identifier: Apache-2.0
"""Parses the JAAS line of `sasl.jaas.config`: the class of a login module, a control flag, options, a semicolon.

    org.apache.kafka.common.security.plain.PlainLoginModule required username="alice" password="secret";

The tokens are those of Kafka: words, quoted texts with backslash escapes, `=` and `;`, and comments. The parser is
stricter where Kafka would guess: a repeated option, a second module, or a slash outside of quotes (for Kafka the begin
of a comment) is an error. No error shows a value, since values are passwords.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

PLAIN_MODULE: Final = "org.apache.kafka.common.security.plain.PlainLoginModule"
SCRAM_MODULE: Final = "org.apache.kafka.common.security.scram.ScramLoginModule"
BEARER_MODULE: Final = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule"

_TOKEN: Final = re.compile(
    r"""(?P<skip>[\x00-\x20]+|//[^\n]*|/\*.*?\*/)"""
    r"""|(?P<sign>[;=])"""
    r"""|(?P<word>[^\x00-\x20;=/"']+)"""
    r"""|"(?P<double>(?:[^"\\\r\n]|\\.)*)"|'(?P<single>(?:[^'\\\r\n]|\\.)*)'""",
    re.DOTALL,
)
_ESCAPE: Final = re.compile(r"\\([0-3][0-7]{0,2}|[4-7][0-7]?|.)", re.DOTALL)
_ESCAPED: Final = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v"}
_FLAGS: Final = ("required", "requisite", "sufficient", "optional")


class JaasError(ValueError):
    """A line that is not valid. The text shows no values."""


@dataclass(slots=True, frozen=True)
class LoginModule:
    """A login module with its options. `repr` does not show the options, since they are secrets."""

    class_name: str
    options: Mapping[str, str]

    def __repr__(self) -> str:
        return f"LoginModule({self.class_name!r})"


@dataclass(slots=True, frozen=True)
class _Token:
    text: str
    is_sign: bool

    def is_the_sign(self, sign: str) -> bool:
        return self.is_sign and self.text == sign


_END: Final = _Token("", True)


def parse_login_module(text: str) -> LoginModule:
    """Returns the only login module of the line; raises JaasError."""
    tokens = _tokens(text)
    class_name = next(tokens, _END)
    if class_name.is_sign:
        raise JaasError("there is no login module")
    flag = next(tokens, _END)
    if flag.is_sign or flag.text.lower() not in _FLAGS:
        raise JaasError(f"the class of the login module must be followed by one of {', '.join(_FLAGS)}")
    options: dict[str, str] = {}
    while not (name := next(tokens, _END)).is_the_sign(";"):
        if name is _END:
            raise JaasError("it must end with a semicolon")
        if name.is_sign:
            raise JaasError("a '=' has no name of an option before it")
        if not next(tokens, _END).is_the_sign("="):
            raise JaasError(f"there is no '=' after option {len(options) + 1}")
        value = next(tokens, _END)
        if value.is_sign:
            raise JaasError(f"option {len(options) + 1} has no value")
        if name.text in options:
            raise JaasError(f"option {len(options) + 1} occurs twice")
        options[name.text] = value.text
    if next(tokens, None) is not None:
        raise JaasError("there must be one login module only, and nothing after its semicolon")
    return LoginModule(class_name.text, options)


def _tokens(text: str) -> Iterator[_Token]:
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            raise JaasError(_problem_at(text[position], position))
        position = match.end()
        if match["sign"] is not None:
            yield _Token(match["sign"], True)
        elif match["word"] is not None:
            yield _Token(match["word"], False)
        elif match["skip"] is None:
            quoted = match["double"] if match["double"] is not None else match["single"]
            yield _Token(_ESCAPE.sub(_unescape, quoted), False)


def _problem_at(character: str, position: int) -> str:
    if character == "/":
        return f"a slash begins a comment (character {position + 1}); put a value with a slash in quotes"
    return f"the quote of character {position + 1} has no end"


def _unescape(match: re.Match[str]) -> str:
    escape = match[1]
    return chr(int(escape, 8)) if escape[0] in "01234567" else _ESCAPED.get(escape, escape)
