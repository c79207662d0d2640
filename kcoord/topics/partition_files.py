# SPDX-License-Identifier: Apache-2.0
"""The small files beside the segments in a partition's folder."""

from __future__ import annotations

import logging
from itertools import pairwise
from typing import Final

from kcoord.storage.checkpoints import PARTITION_METADATA_FILE, read_leader_epochs, topic_id_in
from kcoord.storage.errors import MalformedCheckpointError
from kcoord.storage.file_system import FileSystem, join, read_file, write_all, write_file_atomically
from kcoord.storage.recovery import Check, go_on
from kcoord.topics.leader_epochs import EpochEntry, LeaderEpochs
from kcoord.topics.producer_files import (
    SNAPSHOT_SUFFIX,
    TRANSACTION_INDEX_SUFFIX,
    InvalidSnapshotError,
    damage_of_index,
    decode_aborted,
    decode_snapshot,
    encode_aborted,
    file_name,
)
from kcoord.topics.producer_state import AbortedTransaction, ProducerEntry
from kcoord_protocol.uuid import uuid_to_string

EPOCHS_FILE: Final = "leader-epoch-checkpoint"

_DECODING: Final = 60
"""Decoding a byte of producer state takes so many times longer than checking a byte of a batch."""

_logger = logging.getLogger(__name__)


class PartitionFiles:
    """partition.metadata, leader-epoch-checkpoint, producer snapshots and transaction indexes, in Kafka's formats.

    The log holds the same facts, and the metadata log the topic id, so most of the files are not synced. Only the
    transaction indexes are: a snapshot makes the load skip the batches from which it could make their entries again.
    """

    __slots__ = ("directory", "fs")

    def __init__(self, fs: FileSystem, directory: str) -> None:
        self.fs = fs
        self.directory = directory

    def _path(self, name: str) -> str:
        return join(self.directory, name)

    def _replace(self, name: str, data: bytes) -> None:
        """Replaces a file atomically, without a sync.

        A sync would block the event loop, and the log holds the same facts.
        """
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
        """Makes the folder and writes partition.metadata."""
        self.fs.make_dirs(self.directory)
        self._replace(PARTITION_METADATA_FILE, f"version: 0\ntopic_id: {uuid_to_string(topic_id)}".encode())

    def topic_id(self) -> bytes | None:
        return topic_id_in(self.fs, self.directory)

    # --- leader epochs ------------------------------------------------------------------------------------------------

    def load_epochs(self) -> LeaderEpochs:
        try:
            rows = read_leader_epochs(self.fs, self._path(EPOCHS_FILE))
        except MalformedCheckpointError as error:
            _logger.warning("%s: rebuilding the leader epochs from the log: %s", self.directory, error)
            rows = []
        epochs = LeaderEpochs()
        for row in rows:
            epochs.assign(*EpochEntry(*row))
        return epochs

    def store_epochs(self, epochs: LeaderEpochs) -> None:
        self._replace(EPOCHS_FILE, epochs.to_text().encode())

    # --- producer state -----------------------------------------------------------------------------------------------

    def offsets_with(self, suffix: str) -> list[int]:
        """Returns the offsets in the names of the files with a suffix, ascending."""
        names = self.fs.list_dir(self.directory)
        offsets = [name.removesuffix(suffix) for name in names if name.endswith(suffix)]
        return sorted(int(offset) for offset in offsets if offset.isdigit())

    def load_snapshot(
        self, first_offset: int, end_offset: int, check: Check = go_on
    ) -> tuple[int, list[ProducerEntry]] | None:
        """Returns the newest usable snapshot and its offset, None if there is none.

        `check` is called before a file is decoded, here and in `load_aborted`, and may end this by an error.

        Removes snapshots that must not be used:

        * beyond the end of the log: the log has lost the batches that they cover
        * at or before its first segment: the batches after them, which may have ended transactions, are deleted
        * all, if a transaction index is damaged: its entries have to be made again from the log
        """
        is_indexed = self._are_indexes_sound(check)
        usable: list[int] = []
        removed: list[int] = []
        for offset in self.offsets_with(SNAPSHOT_SUFFIX):
            (usable if is_indexed and first_offset < offset <= end_offset else removed).append(offset)
        for offset in removed:
            self._remove(offset, SNAPSHOT_SUFFIX)
        if removed and (removed[-1] > end_offset or not is_indexed):
            # A power loss must not bring them back, since they would fit the log once it has grown.
            self.fs.sync_dir(self.directory)
        for offset in reversed(usable):
            data = read_file(self.fs, self._path(file_name(offset, SNAPSHOT_SUFFIX)))
            check(_DECODING * len(data))
            try:
                return offset, decode_snapshot(data)
            except InvalidSnapshotError as error:
                _logger.warning("%s: ignoring the producer snapshot at offset %d: %s", self.directory, offset, error)
        return None

    def store_snapshot(self, offset: int, snapshot: bytes) -> None:
        self._replace(file_name(offset, SNAPSHOT_SUFFIX), snapshot)

    def _are_indexes_sound(self, check: Check) -> bool:
        for base_offset in self.offsets_with(TRANSACTION_INDEX_SUFFIX):
            name = file_name(base_offset, TRANSACTION_INDEX_SUFFIX)
            data = read_file(self.fs, self._path(name))
            check(_DECODING * len(data))
            if damage_of_index(data) is not None:
                _logger.warning("%s: %s is damaged: rebuilding the producer state from the log", self.directory, name)
                return False
        return True

    def load_aborted(self, end_offset: int, check: Check = go_on) -> list[AbortedTransaction]:
        """Returns the aborted transactions of the indexes whose markers are before `end_offset`; removes all others."""
        transactions: list[AbortedTransaction] = []
        for base_offset in self.offsets_with(TRANSACTION_INDEX_SUFFIX):
            name = file_name(base_offset, TRANSACTION_INDEX_SUFFIX)
            data = read_file(self.fs, self._path(name))
            check(_DECODING * len(data))
            kept = [transaction for transaction in decode_aborted(data) if transaction.last_offset < end_offset]
            rest = b"".join(map(encode_aborted, kept))
            if rest != data:
                write_file_atomically(self.fs, self._path(name), rest)
            transactions += kept
        # If the cleaner has merged two segments, the index of the first one may have entries after those of the second.
        return sorted(transactions, key=lambda transaction: transaction.last_offset)

    def store_aborted(self, base_offset: int, transactions: list[AbortedTransaction]) -> None:
        """Adds transactions to the index of the segment at `base_offset`, durably. Does not add them twice."""
        name = file_name(base_offset, TRANSACTION_INDEX_SUFFIX)
        indexed = decode_aborted(read_file(self.fs, self._path(name))) if self.fs.exists(self._path(name)) else []
        kept = [transaction for transaction in indexed if transaction.last_offset < transactions[0].last_offset]
        write_file_atomically(self.fs, self._path(name), b"".join(map(encode_aborted, kept + transactions)))

    def forget_aborted(self, marker_offsets: set[int], check: Check = go_on) -> None:
        """Removes the transactions with these marker offsets from the indexes, durably.

        `check` is called for each index, and may end this by an error.
        """
        for base_offset in self.offsets_with(TRANSACTION_INDEX_SUFFIX):
            check(0)
            name = file_name(base_offset, TRANSACTION_INDEX_SUFFIX)
            transactions = decode_aborted(read_file(self.fs, self._path(name)))
            kept = [transaction for transaction in transactions if transaction.last_offset not in marker_offsets]
            if len(kept) < len(transactions):
                write_file_atomically(self.fs, self._path(name), b"".join(map(encode_aborted, kept)))

    def remove_below(self, first_offset: int) -> None:
        """Removes snapshots and transaction indexes of deleted segments, which are those before `first_offset`."""
        for offset in self.offsets_with(SNAPSHOT_SUFFIX):
            if offset < first_offset:
                self._remove(offset, SNAPSHOT_SUFFIX)
        for base_offset, following in pairwise(self.offsets_with(TRANSACTION_INDEX_SUFFIX)):
            # An index holds the markers from its own offset up to the offset of the next index.
            if following <= first_offset:
                self._remove(base_offset, TRANSACTION_INDEX_SUFFIX)

    def _remove(self, offset: int, suffix: str) -> None:
        self.fs.remove(self._path(file_name(offset, suffix)))
