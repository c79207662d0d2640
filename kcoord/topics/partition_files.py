# SPDX-License-Identifier: Apache-2.0
"""The small files beside the segments in a partition's folder, in Kafka's formats: partition.metadata,
leader-epoch-checkpoint, snapshots, txnindex.

None of them is needed for the truth: the log has it all, but for the topic id, which the metadata log has too.
"""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Final

from kcoord.storage.checkpoints import read_leader_epochs, read_topic_id
from kcoord.storage.errors import MalformedCheckpointError
from kcoord.storage.file_system import FileSystem, join, read_file, write_all
from kcoord.topics.leader_epochs import EpochEntry, LeaderEpochs
from kcoord.topics.producer_files import (
    SNAPSHOT_SUFFIX,
    TRANSACTION_INDEX_SUFFIX,
    InvalidSnapshotError,
    decode_aborted,
    decode_snapshot,
    encode_aborted,
    encode_snapshot,
    file_name,
)
from kcoord.topics.producer_state import AbortedTransaction, ProducerEntry
from kcoord_protocol.uuid import uuid_to_string

METADATA_FILE: Final = "partition.metadata"
EPOCHS_FILE: Final = "leader-epoch-checkpoint"

_logger = logging.getLogger(__name__)


class PartitionFiles:
    """See the module's text."""

    __slots__ = ("directory", "fs")

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self.fs = fs
        self.directory = directory

    def _path(self, name: str) -> str:
        return join(self.directory, name)

    def _replace(self, name: str, data: bytes) -> None:
        """Atomic for readers, and not synced: a sync would hold up the event loop for what the log can tell as well."""
        temporary = self._path(f"{name}.tmp")
        file = self.fs.open_append(temporary)
        try:
            file.truncate(0)
            write_all(file, data)
        finally:
            file.close()
        self.fs.rename(temporary, self._path(name))

    # --- partition.metadata -------------------------------------------------------------------------------------------

    def create(self, topic_id: bytes) -> None:
        """Makes the folder and says whose it is."""
        self.fs.make_dirs(self.directory)
        self._replace(METADATA_FILE, f"version: 0\ntopic_id: {uuid_to_string(topic_id)}".encode())

    def topic_id(self) -> bytes | None:
        """Whose folder it is; None where that is not known, which a crash right after its creation may leave."""
        try:
            return read_topic_id(self.fs, self._path(METADATA_FILE))
        except MalformedCheckpointError:
            return None

    # --- leader epochs ------------------------------------------------------------------------------------------------

    def load_epochs(self) -> LeaderEpochs:
        try:
            rows = read_leader_epochs(self.fs, self._path(EPOCHS_FILE))
        except MalformedCheckpointError as error:
            _logger.warning("The leader epochs are read from the log again: %s", error)
            rows = []
        epochs = LeaderEpochs()
        for row in rows:
            epochs.assign(*EpochEntry(*row))
        return epochs

    def store_epochs(self, epochs: LeaderEpochs) -> None:
        self._replace(EPOCHS_FILE, epochs.to_text().encode())

    # --- producer state -----------------------------------------------------------------------------------------------

    def offsets_with(self, suffix: str) -> list[int]:
        """The offsets that files with a suffix are named by, in order."""
        names = [name.removesuffix(suffix) for name in self.fs.list_dir(self.directory) if name.endswith(suffix)]
        return sorted(int(name) for name in names if name.isdigit())

    def load_snapshot(self, end_offset: int) -> tuple[int, list[ProducerEntry]] | None:
        """The newest usable snapshot within the log. One that lies beyond its end is wrong, and removed."""
        for offset in reversed(self.offsets_with(SNAPSHOT_SUFFIX)):
            if offset > end_offset:
                self._remove(offset, SNAPSHOT_SUFFIX)
                continue
            try:
                return offset, decode_snapshot(read_file(self.fs, self._path(file_name(offset, SNAPSHOT_SUFFIX))))
            except InvalidSnapshotError as error:
                _logger.warning("%s: producer snapshot %d is ignored: %s", self.directory, offset, error)
        return None

    def store_snapshot(self, offset: int, entries: list[ProducerEntry]) -> None:
        self._replace(file_name(offset, SNAPSHOT_SUFFIX), encode_snapshot(entries))

    def load_aborted(self, end_offset: int) -> list[AbortedTransaction]:
        """The aborted transactions of the log. Entries whose marker is not in the log, because its end was lost, go,
        and so does a torn entry.
        """
        found: list[AbortedTransaction] = []
        for base_offset in self.offsets_with(TRANSACTION_INDEX_SUFFIX):
            name = file_name(base_offset, TRANSACTION_INDEX_SUFFIX)
            data = read_file(self.fs, self._path(name))
            kept = [transaction for transaction in decode_aborted(data) if transaction.last_offset < end_offset]
            rest = b"".join(map(encode_aborted, kept))
            if rest != data:
                self._replace(name, rest)
            found += kept
        return found

    def forget_aborted(self, marker_offsets: set[int]) -> None:
        """Takes transactions out of the indexes whose markers are removed from the log."""
        for base_offset in self.offsets_with(TRANSACTION_INDEX_SUFFIX):
            name = file_name(base_offset, TRANSACTION_INDEX_SUFFIX)
            found = decode_aborted(read_file(self.fs, self._path(name)))
            kept = [transaction for transaction in found if transaction.last_offset not in marker_offsets]
            if len(kept) < len(found):
                self._replace(name, b"".join(map(encode_aborted, kept)))

    def append_aborted(self, base_offset: int, transaction: AbortedTransaction) -> None:
        """Adds to the transaction index of a segment."""
        file = self.fs.open_append(self._path(file_name(base_offset, TRANSACTION_INDEX_SUFFIX)))
        try:
            write_all(file, encode_aborted(transaction))
        finally:
            file.close()

    def remove_below(self, start_offset: int) -> None:
        """Removes snapshots and transaction indexes of segments that are gone; the newest snapshot may still be
        needed.
        """
        for offset in self.offsets_with(SNAPSHOT_SUFFIX)[:-1]:
            if offset < start_offset:
                self._remove(offset, SNAPSHOT_SUFFIX)
        for base_offset, following in pairwise(self.offsets_with(TRANSACTION_INDEX_SUFFIX)):
            # An index names markers from its own offset up to the next one's.
            if following <= start_offset:
                self._remove(base_offset, TRANSACTION_INDEX_SUFFIX)

    def _remove(self, offset: int, suffix: str) -> None:
        self.fs.remove(self._path(file_name(offset, suffix)))
