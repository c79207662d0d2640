# SPDX-License-Identifier: Apache-2.0
"""The periodic work on partitions: retention, time-based flushes, checkpoints, expired producers, removal of files.

It runs in the event loop in small steps: retention looks at no more than PARTITIONS_PER_TICK partitions per tick, and
waits for the next tick if another thread has to open a log. Expiration looks at PRODUCERS_PER_TICK producers.
Checkpoints wait for the disk, so a background thread writes them; the offsets in them are noted in the event loop.

A deleted segment or topic goes in two steps. Its files are renamed at once (`.deleted`, `-delete`), so that no request
finds them. They are removed when `file.delete.delay.ms` or `log.segment.delete.delay.ms` has passed, or when the broker
stops. After a crash the next start removes the renamed folders, and the opening of a log its renamed segments.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from heapq import heappop, heappush

from kcoord.config import BrokerConfig
from kcoord.storage.errors import StorageError
from kcoord.storage.log_dir import LogDir
from kcoord.storage.rolled import Background
from kcoord.storage.segment import DELETED_SUFFIX
from kcoord.topics.log_opening import LogBeingOpenedError
from kcoord.topics.open_log import OpenLog
from kcoord.topics.partition import Partition
from kcoord.topics.producer_state import ProducerState
from kcoord.topics.retention import delete_below_start, delete_expired
from kcoord.topics.schedule import Every
from kcoord_protocol.errors import KafkaError

PARTITIONS_PER_TICK = 50
PRODUCERS_PER_TICK = 5_000
REMOVALS_PER_TICK = 50
"""The number of old segments and folders of deleted partitions that one tick removes. The others follow later."""

_logger = logging.getLogger(__name__)


class Housekeeping:
    """Does the periodic work of a TopicStore. `partitions` is the live mapping of that store."""

    __slots__ = (
        "_checkpoint",
        "_config",
        "_doomed",
        "_expiration",
        "_flush",
        "_in_background",
        "_log_dir",
        "_partitions",
        "_retention",
        "_to_check",
        "_to_expire",
    )

    def __init__(
        self,
        config: BrokerConfig,
        log_dir: LogDir,
        partitions: Mapping[tuple[str, int], Partition],
        in_background: Background,
    ) -> None:
        self._config = config
        self._in_background = in_background
        self._log_dir = log_dir
        self._partitions = partitions
        self._retention = Every(config.log_retention_check_interval_ms)
        self._flush = Every(config.log_flush_scheduler_interval_ms)
        self._checkpoint = Every(
            min(config.log_flush_offset_checkpoint_interval_ms, config.log_flush_start_offset_checkpoint_interval_ms)
        )
        self._expiration = Every(config.producer_id_expiration_check_interval_ms)
        self._to_check: deque[tuple[str, int]] = deque()
        self._to_expire: Iterator[tuple[ProducerState, int]] | None = None
        """The producers that this round of expiration has still to look at. None between two rounds."""
        self._doomed: list[tuple[int, str]] = []
        """Files of old segments and folders of deleted topics: a heap of (time of removal, path)."""

    def tick(self, now_ms: int) -> None:
        """Does the work that is due."""
        if self._retention.is_due(now_ms) and not self._to_check:
            self._to_check.extend(self._partitions)
        for _ in range(min(PARTITIONS_PER_TICK, len(self._to_check))):
            key = self._to_check.popleft()
            partition = self._partitions.get(key)
            if partition is not None and not self._apply_retention(partition, now_ms):
                # Clients may need other logs before those that come next here.
                self._to_check.appendleft(key)
                break
        if self._flush.is_due(now_ms):
            self._flush_old(now_ms)
        if self._to_expire is None and self._expiration.is_due(now_ms):
            self._to_expire = self._producers()
        if self._to_expire is not None:
            self._expire_some(self._to_expire, now_ms)
        if self._checkpoint.is_due(now_ms):
            self._write_checkpoints()
        for _ in range(REMOVALS_PER_TICK):
            if not self._doomed or self._doomed[0][0] > now_ms:
                break
            self._remove(heappop(self._doomed)[1])

    # --- retention ----------------------------------------------------------------------------------------------------

    def _apply_retention(self, partition: Partition, now_ms: int) -> bool:
        """Deletes old segments. Returns False if the log is still being opened."""
        try:
            opened = partition.open(now_ms)
            start_offset = opened.log.start_offset
            deleted = self._delete_segments(partition, opened, now_ms)
        except LogBeingOpenedError:
            return False
        except KafkaError:
            # The log is not usable. The first attempt to open it has logged the reason.
            return True
        except (OSError, StorageError) as error:
            partition.fail(error)
            return True
        for retired in opened.log.take_retired_files():
            heappush(self._doomed, retired)
        if deleted:
            _logger.info(
                "%s: deleted %d old segments; the log now begins at offset %d",
                partition,
                deleted,
                opened.log.start_offset,
            )
        if deleted or opened.log.start_offset != start_offset:
            partition.on_start_moved(opened)
        return True

    def _delete_segments(self, partition: Partition, opened: OpenLog, now_ms: int) -> int:
        config = partition.config
        if not config.is_deleted:
            return delete_below_start(opened.log, now_ms)
        return delete_expired(
            opened.log, retention_ms=config.retention_ms, retention_bytes=config.retention_bytes, now_ms=now_ms
        )

    # --- flushing and checkpoints -------------------------------------------------------------------------------------

    def _opened(self) -> list[tuple[Partition, OpenLog]]:
        return [
            (partition, partition.opened) for partition in self._partitions.values() if partition.opened is not None
        ]

    def _flush_old(self, now_ms: int) -> None:
        """Flushes logs by flush.ms, every log.flush.scheduler.interval.ms as in Kafka (by default: never)."""
        for partition, opened in self._opened():
            if opened.unflushed_records and now_ms - opened.last_flush_ms >= partition.config.flush_ms:
                try:
                    partition.flush(opened, now_ms)
                except (OSError, StorageError) as error:
                    partition.fail(error)

    def _write_checkpoints(self) -> None:
        """Checkpoints up to where each log is durable, and where it starts.

        Nothing is flushed for a checkpoint. The logs of the coordinators and of the metadata are included.
        """
        self._log_dir.note_durable()
        self._in_background(self._store_checkpoints, None)

    def _store_checkpoints(self) -> None:
        try:
            self._log_dir.write_checkpoints()
        except OSError as error:
            _logger.error("Writing the checkpoints failed: %s", error)

    # --- producers ----------------------------------------------------------------------------------------------------

    def _producers(self) -> Iterator[tuple[ProducerState, int]]:
        for _, opened in self._opened():
            for producer_id in list(opened.producers.entries):
                yield opened.producers, producer_id

    def _expire_some(self, left: Iterator[tuple[ProducerState, int]], now_ms: int) -> None:
        for _ in range(PRODUCERS_PER_TICK):
            producer = next(left, None)
            if producer is None:
                self._to_expire = None
                return
            producers, producer_id = producer
            producers.expire(producer_id, now_ms, self._config.producer_id_expiration_ms)

    # --- deleted topics and segments ----------------------------------------------------------------------------------

    def retire(self, partitions: list[tuple[str, int, str, int]]) -> None:
        """Renames the folders of deleted partitions; they are removed log.segment.delete.delay.ms after the deletion.

        `partitions` are (topic, partition, unique text for the new name, time of the deletion).
        """
        if not partitions:
            return
        try:
            folders = self._log_dir.delete_partitions([partition[:3] for partition in partitions])
        except OSError as error:
            _logger.error("Renaming the folders of %d deleted partitions failed: %s", len(partitions), error)
            return
        removal_ms = partitions[0][3] + self._config.log_segment_delete_delay_ms
        for folder in folders:
            heappush(self._doomed, (removal_ms, folder))

    def _remove(self, path: str) -> None:
        try:
            if path.endswith(DELETED_SUFFIX):
                # The folder of the partition may be gone, or the log was opened again: both remove the file.
                with suppress(FileNotFoundError):
                    self._log_dir.file_system.remove(path)
            else:
                self._log_dir.remove_folder(path)
        except OSError as error:
            _logger.warning("Removing %s failed: %s", path, error)

    def finish(self, now_ms: int) -> None:
        """Removes the files of deleted topics and segments without their delay, since no request reads them now."""
        while self._doomed:
            self._remove(heappop(self._doomed)[1])
