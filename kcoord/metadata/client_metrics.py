# SPDX-License-Identifier: Apache-2.0
"""Configs of client metrics subscriptions (KIP-714), and the clients that they match."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Protocol

from kcoord.config import CLIENT_METRICS_KEYS, ConfigError
from kcoord.metadata.image import CLIENT_METRICS_RESOURCE, MetadataImage
from kcoord_protocol.errors import Errors, KafkaError

DEFAULT_INTERVAL_MS: Final = 300_000
MAX_PROGRAM_BYTES: Final = 1 << 20
MIN_INTERVAL_MS = 100
MAX_INTERVAL_MS = 3_600_000
MATCH_PARAMETERS = frozenset(
    {
        "client_instance_id",
        "client_id",
        "client_software_name",
        "client_software_version",
        "client_source_address",
        "client_source_port",
    }
)


class Pattern(Protocol):
    """A compiled regular expression."""

    def fullmatch(self, text: str) -> object | None: ...


@lru_cache(maxsize=256)
def _compiled(pattern: str) -> Pattern:
    """Returns a compiled pattern.

    A client that may set configs must not be able to block the broker with an expression. RE2 takes linear time and
    bounded memory.
    """
    import re2

    options = re2.Options()
    options.log_errors = False
    options.max_mem = MAX_PROGRAM_BYTES
    options.never_capture = True
    compiled: Pattern = re2.compile(pattern, options)
    return compiled


@dataclass(slots=True, frozen=True)
class MetricsSubscription:
    """The metrics that a subscription requests from its clients.

    These are the clients whose attributes match all `patterns`, pairs of attribute and regular expression.
    """

    metrics: tuple[str, ...]
    interval_ms: int
    patterns: tuple[tuple[str, str], ...]

    def matches(self, attributes: Mapping[str, str]) -> bool:
        """Returns whether a client matches. A pattern must match the whole attribute."""
        return all(
            _compiled(pattern).fullmatch(attributes.get(name, "")) is not None for name, pattern in self.patterns
        )


def subscriptions_of(image: MetadataImage) -> tuple[MetricsSubscription, ...]:
    """Returns all subscriptions, in the order of their names.

    Unusable subscriptions are left out. Another program may have written them to the log.
    """
    subscriptions = []
    for name in image.resource_names(CLIENT_METRICS_RESOURCE):
        configs = image.client_metrics_configs(name)
        try:
            check_client_metrics_configs(configs)
        except KafkaError:
            continue
        subscriptions.append(_subscription(configs))
    return tuple(subscriptions)


def _subscription(configs: Mapping[str, str]) -> MetricsSubscription:
    interval, match, metrics = (
        key.parse(configs[name]) if name in configs else key.default for name, key in CLIENT_METRICS_KEYS.items()
    )
    assert isinstance(interval, int)
    assert isinstance(match, list)
    assert isinstance(metrics, list)
    pairs = {name.strip(): pattern.strip() for name, _, pattern in (entry.partition("=") for entry in match)}
    return MetricsSubscription(tuple(metrics), interval, tuple(pairs.items()))


def check_client_metrics_configs(configs: Mapping[str, str]) -> None:
    """Raises KafkaError for unknown keys and values that cannot be used."""
    for name, text in configs.items():
        key = CLIENT_METRICS_KEYS.get(name)
        if key is None:
            raise KafkaError(Errors.INVALID_REQUEST, f"Unknown client metrics configuration: {name}")
        try:
            value = key.parse(text)
        except ConfigError as error:
            raise KafkaError(Errors.INVALID_CONFIG, str(error)) from None
        if isinstance(value, int) and not MIN_INTERVAL_MS <= value <= MAX_INTERVAL_MS:
            raise KafkaError(
                Errors.INVALID_REQUEST,
                f"Invalid value {value} for interval.ms, interval must be between {MIN_INTERVAL_MS} and "
                f"{MAX_INTERVAL_MS} (1 hour)",
            )
        if name == "match" and isinstance(value, list):
            for entry in value:
                _check_match(entry)


def _check_match(entry: str) -> None:
    import re2

    parameter, separator, pattern = entry.partition("=")
    try:
        _compiled(pattern.strip())
    except re2.error:
        separator = ""
    if not separator or parameter.strip() not in MATCH_PARAMETERS:
        raise KafkaError(Errors.INVALID_CONFIG, f"Illegal client matching pattern: {entry}")
