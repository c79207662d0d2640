# SPDX-License-Identifier: Apache-2.0
"""The folders of `__consumer_offsets`, on any file system that pyarrow or Hadoop supports.

A broker may run on these folders: this code locks nothing and changes nothing. A position in a log is kept as a log
offset. File names and byte positions are looked up at each use, since the broker rolls and cleans segments at any time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from urllib.parse import unquote

import numpy as np
import pyarrow as pa
from pyarrow import fs

from kcoord.pipeline.buffers import Bytes, padded
from kcoord.storage.checkpoints import PARTITION_METADATA_FILE
from kcoord.storage.recovery import SWAP_SUFFIX, base_offset_of
from kcoord.storage.segment import LOG_SUFFIX
from kcoord.storage.segment_indexes import INDEX_SUFFIX

_URI: Final = re.compile(r"^(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/]*)(?P<path>/.*)?$")
_ARROW_SCHEMES: Final = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "mock")
_TOPIC_ID: Final = re.compile(rb"^topic_id: (\S+)", re.MULTILINE)
_META_PROPERTIES: Final = "meta.properties"
_CLUSTER_ID: Final = re.compile(rb"^cluster\.id=(\S+)", re.MULTILINE)
LONGEST_NAME: Final = 255
"""In bytes. The file systems of Linux have this limit."""
_INDEX_ENTRY: Final = np.dtype([("offset", ">i4"), ("position", ">i4")])


class NoLogError(ValueError):
    """A path has no folder of the topic, or two paths have the same partition."""


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of one log partition. Spark pickles it and sends it to the workers."""

    log_partition: int
    uri: str


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A `.log` file, or its replacement with the suffix `.swap`. Its index has the same name with another suffix."""

    base_offset: int
    path: str
    size_bytes: int

    @property
    def index_path(self) -> str:
        if self.path.endswith(SWAP_SUFFIX):
            return self.path.removesuffix(LOG_SUFFIX + SWAP_SUFFIX) + INDEX_SUFFIX + SWAP_SUFFIX
        return self.path.removesuffix(LOG_SUFFIX) + INDEX_SUFFIX


def open_file_system(uri: str) -> tuple[fs.FileSystem, str]:
    """Returns the file system of a URI and the path in it.

    A URI without a scheme is a local path. A scheme that pyarrow does not support (s3a, oss, wasb ...) goes to Hadoop.
    """
    match = _URI.match(uri)
    if match is None:
        return fs.LocalFileSystem(), uri.removeprefix("file:")
    if match["scheme"] in _ARROW_SCHEMES:
        system, path = fs.FileSystem.from_uri(uri)
        return system, str(path)
    try:
        hadoop = fs.HadoopFileSystem(f"{match['scheme']}://{match['authority']}", 0)
    except OSError as error:
        # The other lines name every place where a library was looked for.
        reason = str(error).partition("\n")[0]
        raise OSError(f"path: {uri} cannot be read with Hadoop's native client: {reason}") from error
    return hadoop, match["path"] or "/"


def long_name_in(uri: str) -> str | None:
    """Returns the problem if a name in the local path `uri` is too long for a file system, else None.

    Object stores have other limits.
    """
    path = unquote(uri.removeprefix("file://").partition("?")[0]) if uri.startswith("file://") else uri
    if "://" in path:
        return None
    for name in path.split("/"):
        size = len(os.fsencode(name))
        if size > LONGEST_NAME:
            return f"the name {name} in {uri} has {size} bytes; names of files have {LONGEST_NAME} at most"
    return None


def join(uri: str, name: str) -> str:
    """Appends a name to the path of a URI. The query, which has pyarrow's options, stays at the end."""
    base, mark, query = uri.partition("?")
    return f"{base.rstrip('/')}/{name}{mark}{query}"


def folders_at(uris: Iterable[str], topic: str) -> list[Folder]:
    """Returns the log partitions of a topic, in order. A URI is that of a data folder, or of one partition's folder.

    Raises NoLogError if there are none, or if two folders hold the same partition.
    """
    pattern = re.compile(rf"^{re.escape(topic)}-(\d+)$")
    folders: dict[int, Folder] = {}
    for uri in uris:
        own = pattern.match(uri.partition("?")[0].rstrip("/").rpartition("/")[2])
        matches = {uri: own} if own else _children(uri, pattern)
        for folder_uri, match in matches.items():
            folder = Folder(int(match[1]), folder_uri)
            other = folders.setdefault(folder.log_partition, folder)
            if other is not folder:
                raise NoLogError(f"path: both {other.uri} and {folder_uri} hold {topic}-{folder.log_partition}")
    if not folders:
        raise NoLogError(f"path: there is no folder {topic}-N at {', '.join(uris)}")
    return [folders[number] for number in sorted(folders)]


def _children(uri: str, pattern: re.Pattern[str]) -> dict[str, re.Match[str]]:
    system, path = open_file_system(uri)
    children = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    names = (child.base_name for child in children if child.type == fs.FileType.Directory)
    return {join(uri, name): match for name in names if (match := pattern.match(name))}


def topic_id_of(folder: Folder) -> str | None:
    """Returns the id of the topic that a log belongs to, None if the folder does not have it."""
    return _search(join(folder.uri, PARTITION_METADATA_FILE), _TOPIC_ID)


def cluster_id_at(uris: Iterable[str]) -> str | None:
    """Returns the id of the cluster to which data folders belong, None if they do not have it."""
    for uri in uris:
        base, mark, query = uri.partition("?")
        for folder in (base, base.rstrip("/").rpartition("/")[0]):
            match = _search(f"{folder.rstrip('/')}/{_META_PROPERTIES}{mark}{query}", _CLUSTER_ID)
            if match is not None:
                return match
    return None


def _search(uri: str, pattern: re.Pattern[bytes]) -> str | None:
    """Returns the group of a pattern in a small file, None if there is no such file or no match."""
    system, path = open_file_system(uri)
    try:
        with system.open_input_stream(path) as file:
            match = pattern.search(file.read())
    except (OSError, pa.ArrowInvalid):
        return None
    return None if match is None else match[1].decode()


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """The byte position at which the batch at `offset` begins, or will begin, in the segment with this base offset."""

    offset: int
    base_offset: int
    position: int


class LogFolder:
    """The segments of one log partition. Each call looks at the folder as it is then."""

    def __init__(self, folder: Folder) -> None:
        self.log_partition = folder.log_partition
        self.uri = folder.uri
        self._system, self._path = open_file_system(folder.uri)

    def segments(self) -> list[SegmentFile]:
        """Lists the segments in order.

        While the broker replaces a segment, the file with the suffix `.swap` is used instead of the old one.
        """
        segments: dict[int, SegmentFile] = {}
        for file in self._system.get_file_info(fs.FileSelector(self._path, allow_not_found=True)):
            for suffix in (LOG_SUFFIX, LOG_SUFFIX + SWAP_SUFFIX):
                base_offset = base_offset_of(file.base_name, suffix)
                if base_offset is not None and (suffix != LOG_SUFFIX or base_offset not in segments):
                    segments[base_offset] = SegmentFile(base_offset, file.path, file.size or 0)
        return [segments[base_offset] for base_offset in sorted(segments)]

    def read(self, segment: SegmentFile, position: int, size_bytes: int) -> Bytes:
        """Reads up to `size_bytes` into a padded buffer.

        Raises FileNotFoundError if the broker has replaced the segment meanwhile.
        """
        data = padded(size_bytes)
        with self._system.open_input_file(segment.path) as file:
            file.seek(position)
            read = file.readinto(data.data[:size_bytes])
        if read < size_bytes:
            data = data[: len(data) - (size_bytes - read)]
            data[read:] = 0
        return data

    def index(self, segment: SegmentFile) -> list[tuple[int, int]]:
        """Returns the sound entries of the index, as (last offset of a batch, position of the batch), in rising order.

        Empty if there is no index. The file of an active segment is preallocated, so zeros follow its entries.
        """
        try:
            with self._system.open_input_file(segment.index_path) as file:
                raw = file.read()
        except (OSError, pa.ArrowInvalid):
            return []
        entries = np.frombuffer(raw[: len(raw) // 8 * 8], _INDEX_ENTRY)
        offsets, positions = entries["offset"].astype(np.int64), entries["position"].astype(np.int64)
        rises = (np.diff(offsets, prepend=-1) > 0) & (np.diff(positions, prepend=-1) > 0)
        sound = int(np.argmin(rises)) if not rises.all() else len(rises)
        sound = min(sound, int(np.searchsorted(positions[:sound], segment.size_bytes)))
        return [*zip((offsets[:sound] + segment.base_offset).tolist(), positions[:sound].tolist(), strict=True)]

    def position_of(self, segment: SegmentFile, offset: int, hint: BatchPlace | None = None) -> int:
        """Returns the position of a batch at or before the batch with `offset`.

        A hint is used if it belongs to this segment. The segment must not have been cleaned since then.
        """
        if offset <= segment.base_offset:
            return 0
        if hint is not None and (hint.base_offset == segment.base_offset and hint.offset <= offset):
            return min(hint.position, segment.size_bytes)
        position = 0
        for last_offset, at in self.index(segment):
            if last_offset > offset:
                break
            position = at
        return position
