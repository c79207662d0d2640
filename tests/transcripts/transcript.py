# SPDX-License-Identifier: Apache-2.0
"""The file format of transcripts: blocks of a command, `----` and its whole answer, separated by empty lines.

    # A comment explains the command below it.
    ConsumerGroupHeartbeat group=g member=A epoch=0 subscribe=foo
    ----
    memberId: A  memberEpoch: 1

A second answer after `---- kafka: REASON` is that of Apache Kafka, if it differs. Directives precede the first command:
`broker KEY=VALUE ...` starts the broker with these settings, and `not on STAGE: REASON` excludes a stage.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

FOLDER: Final = Path(__file__).parent
SEPARATOR: Final = "----"
KAFKA_SEPARATOR: Final = "---- kafka: "


class TranscriptError(ValueError):
    """A file violates the format. The text names the file and the line."""


@dataclass(slots=True)
class Command:
    """A command with its answers.

    `head` has the lines before the separator: comments, and the command, which may continue on indented lines.
    """

    head: list[str]
    line: int
    answer: list[str] = field(default_factory=list)
    kafka_reason: str = ""
    kafka_answer: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The command in one line, without comments."""
        return " ".join(line.strip() for line in self.head if not line.startswith("#"))

    def expected(self, stage: str) -> list[str]:
        return self.kafka_answer if stage == "kafka" and self.kafka_reason else self.answer

    def lines(self) -> list[str]:
        lines = [*self.head, SEPARATOR, *self.answer]
        if self.kafka_reason:
            lines += [KAFKA_SEPARATOR + self.kafka_reason, *self.kafka_answer]
        return lines


@dataclass(slots=True)
class Transcript:
    path: Path
    preamble: list[list[str]] = field(default_factory=list)
    """Blocks of comments and directives."""
    settings: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, str] = field(default_factory=dict)
    """The stages that do not play the file, with the reason."""
    commands: list[Command] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Transcript:
        transcript = cls(path)
        block: list[str] = []
        for number, line in enumerate([*path.read_text("utf-8").splitlines(), ""], 1):
            if line.strip():
                block.append(line)
            elif block:
                transcript._add(block, number - len(block))
                block = []
        return transcript

    def write(self) -> None:
        blocks = [*self.preamble, *(command.lines() for command in self.commands)]
        self.path.write_text("\n\n".join("\n".join(block) for block in blocks) + "\n", "utf-8")

    def _add(self, block: list[str], line: int) -> None:
        if SEPARATOR in block:
            position = block.index(SEPARATOR)
            command = Command(block[:position], line)
            rest = block[position + 1 :]
            kafka = next((i for i, text in enumerate(rest) if text.startswith(KAFKA_SEPARATOR)), len(rest))
            command.answer = rest[:kafka]
            if kafka < len(rest):
                command.kafka_reason = rest[kafka].removeprefix(KAFKA_SEPARATOR)
                command.kafka_answer = rest[kafka + 1 :]
            if not command.text:
                raise TranscriptError(f"{self.path}:{line}: a separator without a command")
            self.commands.append(command)
            return
        if self.commands:
            if all(text.startswith("#") for text in block):
                raise TranscriptError(f"{self.path}:{line}: no command follows directly below the comment")
            # A command without an answer is new, and KCOORD_REWRITE=1 will write its answer.
            self.commands.append(Command(block, line))
            return
        directives = [text for text in block if not text.startswith("#")]
        if directives and not all(self._direct(text) for text in directives):
            self.commands.append(Command(block, line))
            return
        self.preamble.append(block)

    def _direct(self, text: str) -> bool:
        """Reads a directive. Returns False if the line is not a directive."""
        if text.startswith("broker "):
            for setting in text.split()[1:]:
                key, _, value = setting.partition("=")
                self.settings[key] = value
            return True
        if text.startswith("not on "):
            stage, _, reason = text.removeprefix("not on ").partition(": ")
            if not reason:
                raise TranscriptError(f"{self.path}: {text!r} has no reason after the colon")
            self.left_out[stage] = reason
            return True
        return False
