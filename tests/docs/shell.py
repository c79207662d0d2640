# SPDX-License-Identifier: Apache-2.0
"""Takes the commands out of a shell script, without running it."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

_PUNCTUATION = "();<>|&\n"
_COMMENT = re.compile(r"(^|\s)#\s.*$", re.MULTILINE)
_ASSIGNMENT = re.compile(r"[A-Z_0-9]+=.*", re.DOTALL)
_PREFIXES = {"do", "done", "until", "while", "export", "source"}
"""Words before a command or an assignment."""


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """A simple command: the variables set for it, and its words without redirections."""

    variables: dict[str, str]
    words: list[str]


def shell_commands(script: str) -> list[ShellCommand]:
    """Returns the simple commands of a script, those of pipes and substitutions `<(...)` too."""
    lexer = shlex.shlex(_COMMENT.sub("", script).replace("\\\n", " "), posix=True, punctuation_chars=_PUNCTUATION)
    lexer.whitespace = " \t"
    lexer.whitespace_split = True
    lexer.commenters = ""
    commands: list[ShellCommand] = []
    words: list[str] = []
    is_file = False
    for token in [*lexer, "\n"]:
        if not token or set(token) - set(_PUNCTUATION):
            if not is_file:
                words.append(token)
            is_file = False
        elif token in ("<", ">", ">>", ">&", "<<<"):
            is_file = True
        else:
            commands.extend(_commands(words))
            words = []
    return commands


def _commands(words: list[str]) -> Iterator[ShellCommand]:
    variables: dict[str, str] = {}
    rest = list(words)
    while rest and (rest[0] in _PREFIXES or _ASSIGNMENT.fullmatch(rest[0])):
        word = rest.pop(0)
        if word not in _PREFIXES:
            name, _, text = word.partition("=")
            variables[name] = text
    if rest or variables:
        yield ShellCommand(variables, rest)
