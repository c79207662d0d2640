# SPDX-License-Identifier: Apache-2.0
"""ssl.principal.mapping.rules: how the distinguished name of a client certificate becomes the name of a principal.

A rule is DEFAULT, which keeps the distinguished name, or RULE:pattern/replacement/ with an optional L (lower case) or U
(upper case) behind it. Rules are separated by commas or newlines. The first rule whose pattern matches the whole name
decides. Patterns are Python's regular expressions; Kafka's are Java's, which differ only in rare constructs. As in
Java, only ASCII letters are word characters and ignore case. A pattern that Java reads in another way, such as an
intersection of sets, is an error if Python warns of it.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_RULE = re.compile(
    r"\s*(?:(?P<default>DEFAULT)|RULE:(?P<pattern>(?:\\.|[^\\/])*)/(?P<replacement>(?:\\.|[^\\/])*)/(?P<case>[LU]?)|)"
    r"\s*(?:[,\n]|$)"
)
_REFERENCE = re.compile(r"\\(?P<literal>.)|\$(?P<number>[0-9]+)", re.DOTALL)


class PrincipalMappingError(ValueError):
    """A rule that is not valid, or a name that no rule matches."""


@dataclass(slots=True, frozen=True)
class _Rule:
    """A rule with a pattern; None stands for DEFAULT."""

    pattern: re.Pattern[str] | None
    replacement: str = ""
    case: str = ""

    def apply(self, name: str) -> str | None:
        """Returns the name of the principal, or None if the pattern does not match the whole distinguished name."""
        if self.pattern is None:
            return name
        if self.pattern.fullmatch(name) is None:
            return None
        mapped = self.pattern.sub(self._replace, name)
        return mapped.lower() if self.case == "L" else mapped.upper() if self.case == "U" else mapped

    def _replace(self, match: re.Match[str]) -> str:
        """Replaces $n as Java does.

        n is the longest number that a group has. If there is no such group, $n stays.
        """

        def value(reference: re.Match[str]) -> str:
            if reference["literal"] is not None:
                return reference["literal"]
            digits = reference["number"]
            if int(digits[0]) > self._groups:
                return reference[0]
            length = 1
            while length < len(digits) and int(digits[: length + 1]) <= self._groups:
                length += 1
            return (match[int(digits[:length])] or "") + digits[length:]

        return _REFERENCE.sub(value, self.replacement)

    @property
    def _groups(self) -> int:
        return 0 if self.pattern is None else self.pattern.groups


class PrincipalMapper:
    """The rules of a listener. Raises PrincipalMappingError if one of them is not valid."""

    def __init__(self, rules: str) -> None:
        self._text = rules
        self._rules: Sequence[_Rule] = tuple(_parse(rules.strip()))

    def name_of(self, distinguished_name: str) -> str:
        """Returns the name of the principal; raises PrincipalMappingError if no rule matches."""
        for rule in self._rules:
            name = rule.apply(distinguished_name)
            if name is not None:
                return name
        raise PrincipalMappingError(f"No rules apply to {distinguished_name}, rules {self._text}")


def _parse(text: str) -> Iterator[_Rule]:
    """Yields the rules. Empty rules are left out, as in Kafka."""
    position = 0
    while position < len(text):
        match = _RULE.match(text, position)
        if match is None:
            raise PrincipalMappingError(f"Invalid rule: {text[position:]}")
        position = match.end()
        if match["default"]:
            yield _Rule(None)
        elif match["pattern"] is not None:
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("error", FutureWarning)
                    pattern = re.compile(match["pattern"], re.ASCII)
            except (re.error, FutureWarning) as error:
                raise PrincipalMappingError(f"Invalid rule: {match[0].strip()}: {error}") from None
            yield _Rule(pattern, match["replacement"], match["case"])
