# SPDX-License-Identifier: Apache-2.0
"""Replays a data folder in memory, without writing, to count what a broker would serve from it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from kcoord.logtools.folders import FolderReader, is_metadata_topic, partitions_in
from kcoord.logtools.live_state import LiveState
from kcoord.logtools.metadata_source import read_metadata
from kcoord.logtools.transactions import TransactionResolver
from kcoord.metadata.image import MetadataImage
from kcoord.runtime.serde import CoordinatorSerde
from kcoord.storage.errors import StorageError
from kcoord.storage.file_system import FileSystem
from kcoord_protocol.errors import DecodeError
from kcoord_protocol.internal_topics import GROUP_METADATA_TOPIC


@dataclass(slots=True)
class Replayed:
    """The live content of a folder."""

    image: MetadataImage
    groups: Counter[str] = field(default_factory=Counter)
    offsets: int = 0
    end_offsets: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def replay_folder(fs: FileSystem, path: str) -> Replayed:
    """Reads every log. A log that cannot be replayed is added to `problems` and raises nothing."""
    result = Replayed(MetadataImage.empty())
    for partition in partitions_in(fs, path):
        try:
            if is_metadata_topic(partition.topic):
                result.image = read_metadata(fs, partition.path).image
            elif partition.topic == GROUP_METADATA_TOPIC:
                _replay_groups(fs, partition.path, result)
            end_offset = 0
            for frame in FolderReader(fs, partition.path).batches():
                end_offset = frame.last_offset + 1
            result.end_offsets[partition.name] = end_offset
        except (StorageError, DecodeError) as error:
            result.problems.append(f"{partition.name}: {error}")
    return result


def _replay_groups(fs: FileSystem, path: str, result: Replayed) -> None:
    serde = CoordinatorSerde()
    state = LiveState()
    resolver = TransactionResolver()
    for frame in FolderReader(fs, path).batches():
        for record in resolver.feed(frame.batch):
            decoded = serde.deserialize(record.key, record.value)
            if decoded is not None:
                state.note(decoded)
    result.groups += state.groups
    result.offsets += state.offsets
