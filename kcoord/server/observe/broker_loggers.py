# SPDX-License-Identifier: Apache-2.0
"""BROKER_LOGGER resources: reads and sets the levels of this process's loggers, by Kafka's names for levels.

As in Kafka, levels are not in the metadata log, and a restart resets them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from kcoord.metadata.collect import duplicates
from kcoord.metadata.names import check_node_id
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import IncrementalAlterConfigsRequest

ROOT: Final = "root"
OUR_LOGGERS: Final = ("kcoord", "kcoord_protocol", "kafka", "asyncio")
LEVELS: Final[Mapping[str, int]] = {
    "TRACE": 5,
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "FATAL": logging.CRITICAL,
}
SET, DELETE = 0, 1
_REFUSED_OPERATIONS: Final[Mapping[int, str]] = {2: "APPEND operation", 3: "SUBTRACT operation"}


def logger_levels() -> dict[str, str]:
    """Returns the effective levels of the root logger and of all loggers of this program, by logger name."""
    names = sorted(name for name in logging.root.manager.loggerDict if name.partition(".")[0] in OUR_LOGGERS)
    return {ROOT: _level_name(logging.root), **{name: _level_name(logging.getLogger(name)) for name in names}}


def _level_name(logger: logging.Logger) -> str:
    level = logger.getEffectiveLevel()
    return next((name for name, number in reversed(list(LEVELS.items())) if level >= number), "TRACE")


def alter_levels(
    name: str,
    node_id: int,
    changes: Sequence[IncrementalAlterConfigsRequest.AlterableConfig],
    *,
    validate_only: bool,
) -> None:
    """Sets the levels of loggers, or removes them, so that a logger has the level of its parent again.

    Raises KafkaError if `name` is not the id of this broker, or if any change is not allowed. Then no level is changed.
    """
    if duplicates(change.name for change in changes):
        raise KafkaError(Errors.INVALID_REQUEST, "Error due to duplicate config keys")
    check_node_id(name, "Node id")
    if name != str(node_id):
        raise KafkaError(Errors.INVALID_REQUEST, f"Unexpected node id. Expected {node_id}, but received {name}")
    levels = logger_levels()
    for change in changes:
        _check_change(change, levels)
    if validate_only:
        return
    for change in changes:
        logger = logging.getLogger(None if change.name == ROOT else change.name)
        logger.setLevel(LEVELS[change.value] if change.config_operation == SET and change.value else logging.NOTSET)


def _check_change(change: IncrementalAlterConfigsRequest.AlterableConfig, levels: Mapping[str, str]) -> None:
    if change.config_operation not in (SET, DELETE):
        operation = _REFUSED_OPERATIONS.get(
            change.config_operation, f"Unknown operation type {change.config_operation}"
        )
        raise KafkaError(Errors.INVALID_REQUEST, f"{operation} is not allowed for the BROKER_LOGGER resource")
    if change.config_operation == SET and change.value is None:
        raise KafkaError(Errors.INVALID_REQUEST, f"Null value not supported for : {change.name}")
    if change.name not in levels:
        raise KafkaError(Errors.INVALID_CONFIG, f"Logger {change.name} does not exist!")
    if change.config_operation == SET and change.value not in LEVELS:
        raise KafkaError(
            Errors.INVALID_CONFIG,
            f"Cannot set the log level of {change.name} to {change.value} as it is not a supported log level. "
            f"Valid log levels are {', '.join(sorted(LEVELS))}",
        )
    if change.config_operation == DELETE and change.name == ROOT:
        raise KafkaError(Errors.INVALID_REQUEST, "Removing the log level of the root logger is not allowed")
