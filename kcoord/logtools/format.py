# SPDX-License-Identifier: Apache-2.0
"""Formats a data folder before the first start of its broker, as Kafka's storage tool does."""

from __future__ import annotations

from collections.abc import Sequence

from kcoord.config import BrokerConfig
from kcoord.logtools.copying import new_folder
from kcoord.runtime.result import CoordinatorRecord
from kcoord.runtime.serde import MetadataSerde
from kcoord.storage.errors import StorageError
from kcoord.storage.file_system import FileSystem, join, make_durable_dirs
from kcoord.storage.log_dir import META_PROPERTIES_FILE, Identity, LogDir, parse_partition_folder
from kcoord.storage.segment import LogConfig
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC
from kcoord_protocol.record_batch import encode_batch_from_parts

_BUILDING = "kcoord-format"


def is_formatted(fs: FileSystem, folder: str) -> bool:
    return fs.exists(join(folder, META_PROPERTIES_FILE))


def format_folder(
    fs: FileSystem,
    config: BrokerConfig,
    identity: Identity,
    made: Sequence[CoordinatorRecord],
    now_ms: int,
) -> None:
    """Writes meta.properties and a metadata log with the records into the data folder.

    The files are built in a subfolder and then moved, because the data folder itself may be a mount point. The folder
    is formatted when meta.properties is there, which is moved last. Raises StorageError if the folder has partitions.
    """
    folder = config.data_folders[0]
    make_durable_dirs(fs, folder)
    partitions = [name for name in fs.list_dir(folder) if parse_partition_folder(name) is not None]
    if partitions:
        raise StorageError(f"{folder} has no {META_PROPERTIES_FILE}, but partition folders such as {partitions[0]}")
    building = join(folder, _BUILDING)
    with new_folder(fs, building, "a format") as incomplete:
        log_dir = LogDir.open(fs, incomplete, identity)
        try:
            log_config = LogConfig(segment_bytes=config.metadata_log_segment_bytes)
            log = log_dir.open_log(CLUSTER_METADATA_TOPIC, 0, log_config, now_ms)
            serde = MetadataSerde()
            pairs = [serde.serialize(record) for record in made]
            log.append(encode_batch_from_parts(pairs, now_ms, log.end_offset), now_ms=now_ms)
        finally:
            log_dir.close()
    names = sorted(fs.list_dir(building), key=lambda name: (name == META_PROPERTIES_FILE, name))
    for name in names:
        if name == META_PROPERTIES_FILE:
            fs.sync_dir(folder)
        fs.rename(join(building, name), join(folder, name))
    fs.remove_dir(building)
    fs.sync_dir(folder)
