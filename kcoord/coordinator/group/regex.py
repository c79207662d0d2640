# SPDX-License-Identifier: Apache-2.0
"""Topic subscriptions by regular expression (KIP-848 Topic Subscription).

Expressions have RE2 syntax, match in linear time, and must match the whole topic name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from kcoord.runtime.result import DescribableTopics
from kcoord_protocol.errors import Errors, KafkaError

MAX_PATTERN_BYTES: Final = 8 << 10
MAX_PROGRAM_BYTES: Final = 4 << 20
"""The limits of one expression: of its text, and of the memory of the compiled form.

The event loop compiles a new expression, so both limit how long a heartbeat can stop the broker. The time may grow with
the square of the length.
"""


@dataclass(slots=True)
class ResolveRegex:
    """The work of a task: match the group's regular expressions against all topic names of the image at `version`.

    Topics that the member whose heartbeat started the task may not describe do not match, as in Kafka.
    """

    group_id: str
    regexes: tuple[str, ...]
    version: int
    describable: DescribableTopics | None = field(default=None, compare=False, repr=False)


@dataclass(slots=True)
class ResolvedRegexes:
    """The value of a ResolveRegex task: regular expression -> the topic names that it matches at `version`."""

    version: int
    topics: Mapping[str, frozenset[str]]


def validate(regex: str) -> None:
    """Raises INVALID_REGULAR_EXPRESSION unless `regex` is an RE2 regular expression of at most MAX_PATTERN_BYTES."""
    import re2

    size = len(regex.encode())
    if size > MAX_PATTERN_BYTES:
        raise KafkaError(
            Errors.INVALID_REGULAR_EXPRESSION,
            f"SubscribedTopicRegex has {size} bytes. At most {MAX_PATTERN_BYTES} are allowed.",
        )
    try:
        re2.compile(regex, _options())
    except re2.error as error:
        text = error.args[0].decode("utf-8", "replace") if isinstance(error.args[0], bytes) else str(error)
        raise KafkaError(
            Errors.INVALID_REGULAR_EXPRESSION,
            f"SubscribedTopicRegex `{regex}` is not a valid regular expression: {text}",
        ) from None


def compile_pattern(regex: str) -> Callable[[str], bool]:
    """Returns a function that is True if the whole text matches.

    Raises INVALID_REGULAR_EXPRESSION as `validate` does.
    """
    import re2

    validate(regex)
    pattern = re2.compile(regex, _options())
    return lambda text: pattern.fullmatch(text) is not None


def resolve(work: ResolveRegex, topic_names: Iterable[str]) -> ResolvedRegexes:
    """Matches every expression against every topic name; an expression that no longer compiles matches nothing."""
    import re2

    names = list(topic_names)
    topics: dict[str, frozenset[str]] = {}
    for regex in work.regexes:
        try:
            pattern = re2.compile(regex, _options())
        except re2.error:
            topics[regex] = frozenset()
            continue
        topics[regex] = frozenset(name for name in names if pattern.fullmatch(name))
    if work.describable is not None:
        visible = work.describable(frozenset().union(*topics.values()))
        topics = {regex: matched & visible for regex, matched in topics.items()}
    return ResolvedRegexes(work.version, topics)


def _options() -> object:
    import re2

    options = re2.Options()
    options.max_mem = MAX_PROGRAM_BYTES
    options.log_errors = False
    # Nobody asks what a group captured. RE2 would need seconds for that if there are a thousand groups.
    options.never_capture = True
    return options
