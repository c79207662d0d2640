# SPDX-License-Identifier: Apache-2.0
"""The log of one topic partition, from its opening to its end. Everything runs in the event loop.

The life of the log:

* *Unopened*: nothing is read before the first use. `open` loads the log and its state.
* *Opening*: if there is much to read, another thread does it (`log_opening`). Requests fail with
  NOT_LEADER_OR_FOLLOWER, so that clients retry; parked fetches stay parked. Produce and ListOffsets wait a while before
  they fail. The next use takes the log.
* *Open*: appends, reads, deletions (`partition`). A failed sync, or a failed write whose bytes cannot be removed, fails
  the log, and so does an append that finds a broken invariant.
  `fail` then abandons it, and the partition is unopened again: the next use opens the log with recovery.
  After any other failed write, such as on a full disk, the log stays open.
* *Failed*: the log is corrupt, the topic is deleted, or another broker leads. Every request gets an error, and nothing
  is opened again. (An `OSError` at opening is not kept: the next request tries again.)
"""

from __future__ import annotations

import logging
from functools import partial
from typing import Final

from kcoord.config import TopicConfig
from kcoord.metadata.image import PartitionImage, TopicImage
from kcoord.storage.errors import CorruptLogError, PartitionHeldError, StorageError
from kcoord.storage.log_dir import STRAY_SUFFIX, LogDir
from kcoord.storage.recovery import Check
from kcoord.storage.replacement import ReplacementAbandoned
from kcoord.storage.segment import LogConfig
from kcoord.topics.log_opening import LogBeingOpenedError, Opening, Openings
from kcoord.topics.open_log import OpenLog, open_and_load, snapshot_at
from kcoord.topics.partition_files import PartitionFiles
from kcoord_protocol.batch_header import crc32c
from kcoord_protocol.errors import Errors, KafkaError

_logger = logging.getLogger(__name__)

STORED_AT_ONCE: Final = 1_000
"""The largest number of producers whose snapshot the event loop makes itself. It takes 1 to 2 ms."""


class PartitionLog:
    """The log of a partition that this broker leads. The module text describes its life."""

    __slots__ = (
        "_failure",
        "_is_new",
        "_log_dir",
        "_open",
        "_opening",
        "_openings",
        "_snapshot",
        "config",
        "image",
        "index",
        "topic",
        "topic_id",
    )

    def __init__(
        self,
        topic: TopicImage,
        image: PartitionImage,
        config: TopicConfig,
        log_dir: LogDir,
        openings: Openings,
        *,
        is_new: bool,
    ) -> None:
        self.topic = topic.name
        self.topic_id = topic.id
        self.index = image.partition_id
        self.image = image
        self._log_dir = log_dir
        self._open: OpenLog | None = None
        self._opening: Opening[OpenLog] | None = None
        self._snapshot: Opening[int] | None = None
        self._openings = openings
        self._failure: str | None = None
        self._is_new = is_new
        self.configure(config)

    def configure(self, config: TopicConfig) -> None:
        """Applies the topic's configuration. The settings of segments take effect with the next append."""
        self.config = config
        if self._open is not None:
            self._open.log.config = self.log_config

    @property
    def files(self) -> PartitionFiles:
        """The small files in the folder. Most partitions of a large cluster never need them, so they are not kept."""
        return PartitionFiles(self._log_dir.file_system, self._log_dir.partition_path(self.topic, self.index))

    @property
    def log_config(self) -> LogConfig:
        """The settings of segments."""
        config = self.config
        segment_ms = min(config.segment_ms, config.max_compaction_lag_ms) if config.is_compacted else config.segment_ms
        return LogConfig(
            config.effective_segment_bytes,
            max(segment_ms - self._jitter_ms(config), 1),
            config.segment_index_bytes,
            config.index_interval_bytes,
            config.file_delete_delay_ms,
        )

    def _jitter_ms(self, config: TopicConfig) -> int:
        """Returns the partition's share of segment.jitter.ms, which spreads the rolls of many partitions.

        A partition always has the same share.
        """
        return (
            crc32c(f"{self.topic}-{self.index}".encode()) % config.segment_jitter_ms if config.segment_jitter_ms else 0
        )

    # --- opening ------------------------------------------------------------------------------------------------------

    @property
    def opened(self) -> OpenLog | None:
        """The log if it is open, else None. Does not open it."""
        return self._open

    def open(self, now_ms: int) -> OpenLog:
        """Returns the log, and opens it if necessary.

        Raises KAFKA_STORAGE_ERROR if it cannot be opened or is damaged, and NOT_LEADER_OR_FOLLOWER while another
        broker still holds it, or another thread opens it.
        """
        if self._open is not None:
            return self._open
        if self._failure is not None:
            raise KafkaError(Errors.KAFKA_STORAGE_ERROR, self._failure)
        try:
            if self._opening is None:
                self._begin_opening(now_ms)
            opened = self._end_opening()
        except PartitionHeldError as error:
            raise KafkaError(Errors.NOT_LEADER_OR_FOLLOWER, str(error)) from error
        except CorruptLogError as error:
            # Every request would find the same damage, so the log is not opened again.
            self._failure = str(error)
            _logger.error("%s-%d is corrupt and is not served: %s", self.topic, self.index, error)
            raise KafkaError(Errors.KAFKA_STORAGE_ERROR, str(error)) from error
        except (OSError, StorageError) as error:
            _logger.error("Opening the log of %s-%d failed: %s", self.topic, self.index, error)
            raise KafkaError(Errors.KAFKA_STORAGE_ERROR, str(error)) from error
        self._open = opened
        return opened

    def opening(self, now_ms: int) -> Opening[OpenLog] | None:
        """Begins to open the log if it is not open. Returns the opening if another thread does it, else None."""
        try:
            self.open(now_ms)
        except LogBeingOpenedError:
            return self._opening
        except KafkaError:
            # The next use of the log raises the same error.
            pass
        return None

    def make_folder(self) -> None:
        """Makes the folder of the partition if it does not exist. Raises OSError if that fails."""
        if self._failure is not None:
            return
        fs, directory = self._log_dir.file_system, self.files.directory
        if self._is_new and fs.exists(directory):
            self._set_aside_other_topic()
        if not fs.exists(directory):
            self._log_dir.forget(self.topic, self.index)
            self.files.create(self.topic_id)
        self._is_new = False

    def _set_aside_other_topic(self) -> None:
        """Sets the folder aside if it belongs to a deleted topic of that name.

        The leader of the deleted topic may have ended before it could remove the folder.
        """
        topic_id = self.files.topic_id()
        if topic_id is None or topic_id == self.topic_id:
            return
        if not self._log_dir.delete_partitions([(self.topic, self.index, topic_id.hex())], STRAY_SUFFIX):
            raise PartitionHeldError(f"another worker still has the log of the deleted {self.topic}-{self.index} open")
        _logger.warning(
            "The folder of %s-%d belongs to a deleted topic: renaming it to *%s", self.topic, self.index, STRAY_SUFFIX
        )

    def _begin_opening(self, now_ms: int) -> None:
        self.make_folder()
        if self.files.topic_id() not in (None, self.topic_id):
            # It was this topic's before. Another worker has learned earlier that the topic was deleted.
            raise PartitionHeldError(f"the folder of {self.topic}-{self.index} belongs to a newer topic")
        read = partial(open_and_load, self._log_dir, self.topic, self.index, self.files, self.log_config, now_ms)
        self._opening = self._openings.begin(self.topic, self.index, read, now_ms)

    def _end_opening(self) -> OpenLog:
        opening = self._opening
        assert opening is not None
        if not opening.has_ended:
            raise LogBeingOpenedError(opening)
        self._opening = None
        opened = opening.result()
        # Both may have changed while the log was being opened.
        opened.log.config = self.log_config
        try:
            self._assign_epoch(opened)
        except BaseException:
            # The next request opens the log again, and a log is open only once.
            opened.log.abandon()
            raise
        if opened.loaded_transactions:
            self._openings.with_transactions[self.topic, self.index] = None
        return opened

    def _cancel_opening(self) -> OpenLog | None:
        """Returns the log if it is open. Nothing touches the folder in another thread afterwards."""
        opening, self._opening = self._opening, None
        opened, self._open = self._open, None
        if opened is not None:
            self._end_snapshot(opened)
        return opening.cancel() if opening is not None else opened

    def _assign_epoch(self, opened: OpenLog) -> None:
        if opened.epochs.assign(self.image.leader_epoch, opened.log.end_offset):
            self._store_epochs(opened)

    def _store_epochs(self, opened: OpenLog) -> None:
        """Stores the leader epochs. A failure is only logged: the next snapshot or the next load makes up for it."""
        opened.are_epochs_stored = False
        try:
            self.files.store_epochs(opened.epochs)
            opened.are_epochs_stored = True
        except OSError as error:
            _logger.warning("Writing the leader epochs of %s-%d failed: %s", self.topic, self.index, error)

    def fail(self, error: Exception) -> KafkaError:
        """Returns the error for a failed write. A log that is not usable after it is abandoned.

        The next use opens and recovers such a log. After a broken invariant it also rebuilds the state from the log.
        """
        if self._open is None or self._open.is_news(error):
            _logger.error("Writing to %s-%d failed: %s", self.topic, self.index, error)
        is_broken = isinstance(error, AssertionError)
        if self._open is not None and (is_broken or self._open.log.failure is not None):
            self._end_snapshot(self._open)
            self._open.log.abandon()
            self._open = None
        return KafkaError(Errors.KAFKA_STORAGE_ERROR, f"Writing to {self.topic}-{self.index} failed: {error}")

    # --- snapshots and deletions --------------------------------------------------------------------------------------

    def _take_snapshot(self, opened: OpenLog, offset: int, *, at_once: bool) -> None:
        """Stores the producer state as of `offset`, which bounds what a restart must read.

        Unless `at_once`, another thread does it if that has to wait for the disk, or if there are many producers. A
        failure is only logged: the state can always be read from the log.
        """
        self._end_snapshot(opened)
        if not opened.are_epochs_stored:
            self._store_epochs(opened)
        if opened.snapshot_offset >= offset or not opened.are_epochs_stored:
            return
        is_long = bool(opened.not_indexed()) or len(opened.producers.entries) > STORED_AT_ONCE
        store = snapshot_at(opened, self.files, offset)
        name, in_background = f"{self.topic}-{self.index}", is_long and not at_once
        self._snapshot = self._openings.run(name, store, in_background=in_background)
        if self._snapshot.has_ended:
            self._end_snapshot(opened)
        else:
            self._snapshot.observers.append(partial(self._end_snapshot, opened, self._snapshot))

    def _end_snapshot(self, opened: OpenLog, ended: Opening[int] | None = None) -> None:
        """Ends the storing of a snapshot, or `forget_aborted`. Another thread that does it touches no file afterwards.

        Does nothing if another snapshot than `ended` is being stored by now.
        """
        snapshot = self._snapshot
        if snapshot is None or ended not in (None, snapshot):
            return
        self._snapshot = None
        snapshot.cancel()
        opened.producers.end_snapshot()
        try:
            if snapshot.has_ended:
                opened.snapshot_offset = snapshot.result()
        except (OSError, StorageError) as error:
            _logger.warning("Writing the producer state of %s-%d failed: %s", self.topic, self.index, error)

    def flush(self, opened: OpenLog, now_ms: int) -> None:
        """Makes the whole log durable."""
        opened.log.flush()
        opened.unflushed_records = 0
        opened.last_flush_ms = now_ms

    def on_start_moved(self, opened: OpenLog) -> None:
        """Drops the leader epochs before the new start of the log, and what belongs to deleted segments.

        The segments that DeleteRecords leaves keep their small files: the new start is not durable yet. A file that
        cannot be removed stays until the start moves again, or until the log is opened again.
        """
        if opened.epochs.advance_start(opened.log.start_offset):
            self._store_epochs(opened)
        opened.producers.advance_start(opened.first_offset)
        try:
            self.files.remove_below(opened.first_offset)
        except OSError as error:
            _logger.warning("Removing old files of %s-%d failed: %s", self.topic, self.index, error)

    def forget_aborted(self, opened: OpenLog, marker_offsets: set[int]) -> Opening[int]:
        """Drops aborted transactions whose last records and markers the cleaner removes.

        The cleaner's thread runs the returned work, which removes them from the transaction indexes, too. If that does
        not end, because the files are needed here, the cleaner begins again.
        """
        if opened.log.is_closed:
            raise ReplacementAbandoned(f"{opened.log.directory}: the log was closed")
        self._end_snapshot(opened)
        opened.producers.forget_aborted(marker_offsets)
        snapshot_offset, files = opened.snapshot_offset, self.files

        def forget(check: Check) -> int:
            files.forget_aborted(marker_offsets, check)
            return snapshot_offset

        forgetting = self._snapshot = self._openings.prepare(f"{self.topic}-{self.index}", forget)
        return forgetting

    # --- end ----------------------------------------------------------------------------------------------------------

    def prepare_close(self) -> None:
        """Writes a producer snapshot, so that the next start does not replay the log.

        `LogDir.close` closes the log itself.
        """
        opened = self._cancel_opening()
        if opened is not None and opened.log.failure is None and opened.log.end_offset > opened.log.start_offset:
            self._take_snapshot(opened, opened.log.end_offset, at_once=True)

    def resign(self) -> None:
        """Makes the log durable and closes it, since another broker leads from now on."""
        log = self._open.log if self._open is not None else None
        self.prepare_close()
        self._failure = f"{self.topic}-{self.index} is led by another broker."
        if log is None:
            return
        try:
            log.close()
        except (OSError, StorageError) as error:
            _logger.error("Closing the log of %s-%d failed: %s", self.topic, self.index, error)

    def delete(self) -> None:
        """Stops serving a partition of a deleted topic. The owner may rename the folder afterwards."""
        opened = self._cancel_opening()
        self._failure = f"{self.topic}-{self.index} is deleted."
        if opened is not None:
            opened.log.abandon()
