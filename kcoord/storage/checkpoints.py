# SPDX-License-Identifier: Apache-2.0
"""Kafka's small text files: offset checkpoints, leader epochs, partition.metadata and meta.properties.

All files are replaced atomically. A malformed file raises an error with the file and the line; nothing is guessed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TypeAlias

from kcoord.storage.errors import MalformedCheckpointError, MetaPropertiesError
from kcoord.storage.file_system import FileSystem, join, read_file, write_file_atomically
from kcoord_protocol.uuid import uuid_from_string, uuid_to_string

TopicPartition: TypeAlias = tuple[str, int]
LOCK_FILE = ".lock"
CLEAN_SHUTDOWN_FILE = ".kafka_cleanshutdown"
RECOVERY_POINT_FILE = "recovery-point-offset-checkpoint"
LOG_START_OFFSET_FILE = "log-start-offset-checkpoint"
CLEANER_OFFSET_FILE = "cleaner-offset-checkpoint"
PARTITION_METADATA_FILE = "partition.metadata"

_VERSION = "0"


def read_offset_checkpoint(file_system: FileSystem, path: str) -> dict[TopicPartition, int]:
    """Reads lines `topic partition offset`. Returns an empty dictionary if the file does not exist."""
    offsets: dict[TopicPartition, int] = {}
    for number, fields in _read_lines(file_system, path, 3):
        offsets[fields[0], _number(path, number, fields[1])] = _number(path, number, fields[2])
    return offsets


def write_offset_checkpoint(file_system: FileSystem, path: str, offsets: Mapping[TopicPartition, int]) -> None:
    _write_lines(
        file_system, path, [f"{topic} {partition} {offset}" for (topic, partition), offset in sorted(offsets.items())]
    )


def read_worker_checkpoint(file_system: FileSystem, path: str) -> dict[TopicPartition, tuple[int, str]]:
    """Reads lines `topic partition offset topic-id`, whose last field may be missing. Returns offsets and topic ids."""
    offsets: dict[TopicPartition, tuple[int, str]] = {}
    for number, (topic, partition, offset, *topic_id) in _read_lines(file_system, path, 3, 4):
        offsets[topic, _number(path, number, partition)] = _number(path, number, offset), "".join(topic_id)
    return offsets


def find_in_checkpoint(file_system: FileSystem, path: str, key: TopicPartition) -> tuple[int, str] | None:
    """Returns the offset and the topic id of one partition. Does not parse the lines of the others."""
    if not file_system.exists(path):
        return None
    text = _text(file_system, path)
    before, start, after = text.partition(f"\n{key[0]} {key[1]} ")
    if not start:
        return None
    offset, _, topic_id = after.partition("\n")[0].partition(" ")
    return _number(path, before.count("\n") + 2, offset), topic_id.strip()


def write_worker_checkpoint(
    file_system: FileSystem, path: str, offsets: Mapping[TopicPartition, int], topic_ids: Mapping[TopicPartition, str]
) -> None:
    """Writes a checkpoint with the ids of the topics. Partitions without an id have Kafka's lines."""
    rows = [(*key, offset, topic_ids.get(key, "")) for key, offset in sorted(offsets.items())]
    _write_lines(file_system, path, [" ".join(map(str, row)).rstrip() for row in rows])


def read_leader_epochs(file_system: FileSystem, path: str) -> list[tuple[int, int]]:
    """Reads lines `epoch start_offset`, ascending. Returns an empty list if the file does not exist."""
    lines = _read_lines(file_system, path, 2, may_be_torn=True)
    return [(_number(path, number, fields[0]), _number(path, number, fields[1])) for number, fields in lines]


def write_leader_epochs(file_system: FileSystem, path: str, epochs: Sequence[tuple[int, int]]) -> None:
    _write_lines(file_system, path, [f"{epoch} {start_offset}" for epoch, start_offset in epochs])


def read_topic_id(file_system: FileSystem, path: str) -> bytes | None:
    """Returns the topic id in a partition.metadata file, or None if the file does not exist."""
    if not file_system.exists(path):
        return None
    values = dict(line.split(": ", 1) for line in _text(file_system, path).splitlines() if ": " in line)
    if values.get("version") != _VERSION or "topic_id" not in values:
        raise MalformedCheckpointError(f"{path}: expected the lines `version: 0` and `topic_id: ...`")
    try:
        return uuid_from_string(values["topic_id"])
    except ValueError as error:
        raise MalformedCheckpointError(f"{path}: {values['topic_id']!r} is not a topic id") from error


def topic_id_in(file_system: FileSystem, folder: str) -> bytes | None:
    """Returns the id of the topic that a partition's folder belongs to.

    None if partition.metadata is missing or malformed, as after a crash right after the folder's creation.
    """
    with suppress(MalformedCheckpointError):
        return read_topic_id(file_system, join(folder, PARTITION_METADATA_FILE))
    return None


def write_topic_id(file_system: FileSystem, path: str, topic_id: bytes) -> None:
    text = f"version: {_VERSION}\ntopic_id: {uuid_to_string(topic_id)}"
    write_file_atomically(file_system, path, text.encode())


def read_properties(file_system: FileSystem, path: str) -> dict[str, str] | None:
    """Reads lines `key=value`, as Java writes values without special characters. None if the file does not exist."""
    if not file_system.exists(path):
        return None
    properties: dict[str, str] = {}
    try:
        lines = read_file(file_system, path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise MetaPropertiesError(f"{path}: the file is not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, 1):
        line = line.strip()
        if not line or line[0] in "#!":
            continue
        key, separator, value = line.partition("=")
        if not separator:
            raise MetaPropertiesError(f"{path}, line {number}: expected key=value, found {line!r}")
        properties[key.strip()] = value.strip().replace("\\", "")
    return properties


def write_properties(file_system: FileSystem, path: str, properties: Mapping[str, str]) -> None:
    text = "".join(f"{key}={value}\n" for key, value in sorted(properties.items()))
    write_file_atomically(file_system, path, text.encode())


def _read_lines(
    file_system: FileSystem, path: str, *fields: int, may_be_torn: bool = False
) -> list[tuple[int, list[str]]]:
    """Returns the lines after the version and the count as pairs of line number and fields.

    `may_be_torn`: the file is not synced, so a power loss may leave only the first digits of the last number.
    """
    if not file_system.exists(path):
        return []
    text = _text(file_system, path)
    lines = text.splitlines()
    if may_be_torn and not text.endswith("\n"):
        raise MalformedCheckpointError(f"{path}, line {len(lines)}: the line has no end")
    if len(lines) < 2 or lines[0].strip() != _VERSION:
        raise MalformedCheckpointError(f"{path}, line 1: expected version {_VERSION}, then a count")
    rows = [(number, line.split()) for number, line in enumerate(lines[2:], 3) if line.strip()]
    for number, values in rows:
        if len(values) not in fields:
            raise MalformedCheckpointError(f"{path}, line {number}: expected {fields[0]} fields, got {len(values)}")
    if _number(path, 2, lines[1]) != len(rows):
        raise MalformedCheckpointError(
            f"{path}, line 2: the count is {lines[1]}, but the number of lines after it is {len(rows)}"
        )
    return rows


def _write_lines(file_system: FileSystem, path: str, lines: Sequence[str]) -> None:
    write_file_atomically(
        file_system, path, "".join(f"{line}\n" for line in (_VERSION, str(len(lines)), *lines)).encode()
    )


def _text(file_system: FileSystem, path: str) -> str:
    try:
        return read_file(file_system, path).decode()
    except UnicodeDecodeError as error:
        raise MalformedCheckpointError(f"{path}: the file is not UTF-8 text: {error}") from error


def _number(path: str, line: int, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise MalformedCheckpointError(f"{path}, line {line}: {text!r} is not a number") from None
