# SPDX-License-Identifier: Apache-2.0
"""The log of `kcoord serve`: a name that a client chose cannot look like another line."""

from __future__ import annotations

import logging

from kcoord.cli.serve import OneLineFormatter


def shown(name: str) -> str:
    record = logging.LogRecord("kafka", logging.INFO, "", 0, "Denied on Topic:LITERAL:%s", (name,), None)
    return OneLineFormatter("%(levelname)s %(name)s: %(message)s").format(record)


def test_control_characters_are_shown_as_question_marks() -> None:
    assert shown("a\nINFO kafka: Allowed\r\x1b[2J\u2028\x85") == (
        "INFO kafka: Denied on Topic:LITERAL:a?INFO kafka: Allowed??[2J??"
    )


def test_other_characters_stay() -> None:
    assert shown("größe 売上") == "INFO kafka: Denied on Topic:LITERAL:größe 売上"


def test_a_traceback_keeps_its_lines() -> None:
    record = logging.LogRecord("kafka", logging.ERROR, "", 0, "failed", (), None)
    record.exc_text = "Traceback\n  line"
    assert OneLineFormatter("%(message)s").format(record) == "failed\nTraceback\n  line"
