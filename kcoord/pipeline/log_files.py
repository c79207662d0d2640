# SPDX-License-Identifier: Apache-2.0
"""The folders of `__consumer_offsets` on any file system that pyarrow or Hadoop knows, read beside a running broker.

Nothing is locked or changed. Log offsets name places in a log; file names and byte positions are looked up at each
use, since rolling and cleaning change them at any time.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from pyarrow import fs

from kcoord.pipeline.buffers import Bytes, padded
from kcoord.storage.recovery import SWAP_SUFFIX, base_offset_of
from kcoord.storage.segment import LOG_SUFFIX
from kcoord.storage.segment_indexes import INDEX_SUFFIX

_URI: Final = re.compile(r"^(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<authority>[^/]*)(?P<path>/.*)?$")
_ARROW_SCHEMES: Final = ("file", "s3", "gs", "gcs", "abfs", "abfss", "hdfs", "viewfs", "mock")
_INDEX_ENTRY: Final = np.dtype([("offset", ">i4"), ("position", ">i4")])


class NoLogError(ValueError):
    """There is nothing to read at a path."""


@dataclass(frozen=True, slots=True)
class Folder:
    """The folder of one log partition. Plain data: it goes to the workers."""

    log_partition: int
    uri: str


@dataclass(frozen=True, slots=True)
class SegmentFile:
    """A `.log` file. Its index has the same name with another ending."""

    base_offset: int
    path: str
    size_bytes: int

    @property
    def index_path(self) -> str:
        if self.path.endswith(SWAP_SUFFIX):
            return self.path.removesuffix(LOG_SUFFIX + SWAP_SUFFIX) + INDEX_SUFFIX + SWAP_SUFFIX
        return self.path.removesuffix(LOG_SUFFIX) + INDEX_SUFFIX


def open_file_system(uri: str) -> tuple[fs.FileSystem, str]:
    """The file system and the path in it. A scheme that pyarrow does not have (s3a, oss, wasb ...) is Hadoop's."""
    found = _URI.match(uri)
    if found is None:
        return fs.LocalFileSystem(), uri.removeprefix("file:")
    if found["scheme"] in _ARROW_SCHEMES:
        system, path = fs.FileSystem.from_uri(uri)
        return system, str(path)
    hadoop = fs.HadoopFileSystem(f"{found['scheme']}://{found['authority']}", 0)
    return hadoop, found["path"] or "/"


def join(uri: str, name: str) -> str:
    """A name in a folder; a query of the uri, as pyarrow's options are, stays behind it."""
    base, mark, query = uri.partition("?")
    return f"{base.rstrip('/')}/{name}{mark}{query}"


def folders_at(uris: Iterable[str], topic: str) -> list[Folder]:
    """The log partitions of a topic in data folders, or those whose folders are named themselves, in order."""
    pattern = re.compile(rf"^{re.escape(topic)}-(\d+)$")
    found: dict[int, Folder] = {}
    for uri in uris:
        own = pattern.match(uri.partition("?")[0].rstrip("/").rpartition("/")[2])
        names = {uri: own} if own else _children(uri, pattern)
        for each, name in names.items():
            folder = Folder(int(name[1]), each)
            other = found.setdefault(folder.log_partition, folder)
            if other is not folder:
                raise NoLogError(f"path: both {other.uri} and {each} hold {topic}-{folder.log_partition}")
    if not found:
        raise NoLogError(f"path: there is no folder {topic}-N at {', '.join(uris)}")
    return [found[number] for number in sorted(found)]


def _children(uri: str, pattern: re.Pattern[str]) -> dict[str, re.Match[str]]:
    system, path = open_file_system(uri)
    children = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    matches = (
        (each.base_name, pattern.match(each.base_name)) for each in children if each.type == fs.FileType.Directory
    )
    return {join(uri, name): match for name, match in matches if match}


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """Where the batch at `offset` begins, or the next one will, in the segment with this base offset."""

    offset: int
    base_offset: int
    position: int


class LogFolder:
    """Segments of one log partition, as they are at the moment of each call."""

    def __init__(self, folder: Folder) -> None:
        self.log_partition = folder.log_partition
        self.uri = folder.uri
        self._system, self._path = open_file_system(folder.uri)

    def segments(self) -> list[SegmentFile]:
        """In order. While a segment is being replaced, `.swap` is the one that counts."""
        found: dict[int, SegmentFile] = {}
        for each in self._system.get_file_info(fs.FileSelector(self._path, allow_not_found=True)):
            for suffix in (LOG_SUFFIX, LOG_SUFFIX + SWAP_SUFFIX):
                base_offset = base_offset_of(each.base_name, suffix)
                if base_offset is not None and (suffix != LOG_SUFFIX or base_offset not in found):
                    found[base_offset] = SegmentFile(base_offset, each.path, each.size or 0)
        return [found[base_offset] for base_offset in sorted(found)]

    def read(self, segment: SegmentFile, position: int, size_bytes: int) -> Bytes:
        """Up to so many bytes, padded; FileNotFoundError where the segment was replaced meanwhile."""
        data = padded(size_bytes)
        with self._system.open_input_file(segment.path) as file:
            file.seek(position)
            read = file.readinto(data.data[:size_bytes])
        if read < size_bytes:
            data = data[: len(data) - (size_bytes - read)]
            data[read:] = 0
        return data

    def index(self, segment: SegmentFile) -> list[tuple[int, int]]:
        """(last offset of a batch, position of the batch), rising; empty where there is no index or it makes no sense.

        The index of an active segment is allocated ahead: zeros follow the entries.
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
        """A position in the segment that begins a batch and lies at or before the batch with `offset`.

        A hint is believed where it is about this segment; it must not have been cleaned since.
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
