# SPDX-License-Identifier: Apache-2.0
"""The standbys of the shards that this instance does not own: makes them, follows with them, and takes snapshots.

Theory of operation. Each shard of the topic has either an owner's log (`UpstreamLog`) or a standby
(`kcoord.runtime.standby`) in this process, except while a standby is being made:

1. A standby begins with the copy on this instance's disk (`kcoord.upstream.standby_files`), or empty if there is none.
   The copy is restored a slice at a time, so that it delays no request.
2. It then follows the log. `UpstreamShardLog` fetches for all standbys and owned logs together.
3. If the shard becomes this instance's own, `claimed` returns the standby, which is paused. When the log is claimed,
   the shard set takes the machine. If the claim fails before, `released` lets the standby follow again.
4. If the shard is given up, or its load fails, its machine may have records that the log does not have. So it is
   dropped, and `released` makes another standby from the copy.
5. If the log is not the one that was read before, the standby and its copy are dropped. If a batch cannot be replayed,
   the standby is dropped, too. The next one reads the log from its beginning, after a pause if that has failed before.

A standby is only an advantage. Without it, or if it lags, a takeover reads more from the upstream.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, Final

from kcoord.client.tasks import spawn
from kcoord.metrics.measures import StandbyFigures
from kcoord.runtime.loader import LoadError
from kcoord.runtime.shard_loads import LOAD_SLICE_BYTES
from kcoord.runtime.shard_log import Save
from kcoord.runtime.shard_set import ShardSet
from kcoord.runtime.snapshot import Snapshot
from kcoord.runtime.standby import Standby
from kcoord.runtime.upstream_reader import DivergedError, LogMark, LogNote, UpstreamReader
from kcoord.upstream.requests import Fetched, PartitionRequests
from kcoord.upstream.standby_files import StandbyCopy, StandbyFiles
from kcoord_protocol.errors import CorruptBatchError, Errors, KafkaError
from kcoord_protocol.uuid import ZERO_UUID

if TYPE_CHECKING:
    from concurrent.futures import Future

FIRST_PAUSE_SECONDS: Final = 1.0
LONGEST_PAUSE_SECONDS: Final = 60.0

_logger = logging.getLogger(__name__)


class Standbys:
    """The standbys of one topic; the module describes them.

    `files`: where their snapshots are, None to keep none. `wake` is called if a standby begins to follow.
    `tombstones_kept_ms`: `delete.retention.ms` of the topic.
    """

    def __init__(
        self,
        shards: ShardSet[Any],
        requests: PartitionRequests,
        files: StandbyFiles | None,
        *,
        tombstones_kept_ms: int,
        now_ms: Callable[[], int],
        wake: Callable[[], None],
    ) -> None:
        self._has_caught_up = False
        """True if all standbys were at the end of their logs since this instance has started."""
        self._shards = shards
        self._requests = requests
        self._files = files
        self._tombstones_kept_ms = tombstones_kept_ms
        self._now_ms = now_ms
        self._wake = wake
        self._topic_id = files.topic_id if files is not None else ZERO_UUID
        self._making: dict[int, asyncio.Task[None]] = {}
        self._taken: set[int] = set()
        """The shards that this instance claims or owns."""
        self._behind: set[int] = set()
        """The shards whose standby was never at the end of the log."""
        self._looking: set[int] = set()
        """The shards whose first offset is looked up."""
        self._pauses: dict[int, float] = {}
        """The pause before the next standby of a shard whose last one has failed."""
        self._is_closing = False

    # The life of standbys.

    def begin(self, shard_ids: Iterable[int]) -> None:
        """Follows shards from now on, unless they are claimed or owned."""
        for shard_id in shard_ids:
            if shard_id not in self._shards.standbys and shard_id not in self._taken:
                self._make(shard_id)

    def stop(self) -> None:
        """Makes no standbys any more, and replays nothing. The last snapshots can still be written by `save_now`."""
        self._is_closing = True
        for task in self._making.values():
            task.cancel()
        if self._files is not None:
            self._files.stop()

    async def claimed(self, shard_id: int) -> Standby[Any] | None:
        """Returns the standby of a shard whose log is to be claimed, as soon as it is made. It is paused.

        Returns None if this instance ends.
        """
        while shard_id in self._making or shard_id not in self._shards.standbys:
            self._make(shard_id)
            if self._is_closing:
                return None
            await asyncio.wait([self._making[shard_id]])
        standby = self._shards.standbys[shard_id]
        standby.is_paused = True
        self._taken.add(shard_id)
        return standby

    def released(self, shard_id: int, *, has_diverged: bool) -> None:
        """Follows a shard that this instance does not own, because it gave the shard up or could not claim it."""
        if self._is_closing:
            return
        self._taken.discard(shard_id)
        if has_diverged:
            self._forget(shard_id)
        standby = self._shards.standbys.get(shard_id)
        if standby is None:
            self._make(shard_id)
        elif shard_id not in self._making:
            standby.is_paused = False
            self._wake()

    def _make(self, shard_id: int) -> None:
        if shard_id not in self._making and not self._is_closing:
            self._behind.add(shard_id)
            self._making[shard_id] = spawn(self._restore(shard_id), f"standby of shard {shard_id}")

    async def _restore(self, shard_id: int) -> None:
        """Makes a standby from the copy on disk, or an empty one."""
        try:
            copy = await self._files.read(shard_id) if self._files is not None else None
            standby = await self._from_copy(shard_id, copy) if copy is not None else None
            if standby is None:
                reader = UpstreamReader(self._now_ms(), self._tombstones_kept_ms)
                standby = self._shards.stand_by(shard_id, reader)
            standby.is_paused = False
        finally:
            del self._making[shard_id]
        self._wake()

    async def _from_copy(self, shard_id: int, copy: StandbyCopy) -> Standby[Any] | None:
        """Returns a standby with the state of a copy, or None if the copy cannot be used."""
        snapshot, size_bytes = copy.snapshot, 0
        try:
            reader = UpstreamReader.restored(LogMark.decode(copy.mark), self._tombstones_kept_ms)
            standby = self._shards.stand_by(shard_id, reader)
            standby.is_paused = True
            for chunk in snapshot.chunks:
                standby.loader.restore(chunk)
                size_bytes += len(chunk.data)
                if size_bytes >= LOAD_SLICE_BYTES:
                    size_bytes = 0
                    await asyncio.sleep(0)
        except (ValueError, LoadError, AssertionError) as error:
            _logger.warning("The copy of shard %d is not used, its log is read from the upstream: %s", shard_id, error)
            self._forget(shard_id)
            return None
        return standby

    def _forget(self, shard_id: int) -> None:
        """Drops a standby and the copy on disk."""
        self._shards.standbys.pop(shard_id, None)
        if self._files is not None:
            self._files.remove(shard_id)

    def _drop(self, shard_id: int, pause_seconds: float = 0) -> None:
        """Drops a standby with its copy. After a pause, another one reads the log from its beginning."""
        self._forget(shard_id)
        if pause_seconds:
            asyncio.get_running_loop().call_later(pause_seconds, self.begin, [shard_id])
        else:
            self._make(shard_id)

    # Following.

    def offsets(self) -> dict[int, int]:
        """Returns the offsets from which to fetch next, by shard."""
        if self._requests.topic_id not in (self._topic_id, ZERO_UUID):
            self._follow_new_topic(self._requests.topic_id)
        return {
            shard_id: standby.reader.fetch_offset
            for shard_id, standby in self._shards.standbys.items()
            if not standby.is_paused and shard_id not in self._looking
        }

    def is_behind(self, shard_id: int) -> bool:
        """True if the log has more than the standby has replayed."""
        standby = self._shards.standbys.get(shard_id)
        return standby is not None and bool(standby.lag)

    def _follow_new_topic(self, topic_id: bytes) -> None:
        had_topic = self._topic_id != ZERO_UUID
        self._topic_id = topic_id
        if self._files is not None:
            self._files.topic_id = topic_id
        if had_topic:
            _logger.error("The topic with the logs of groups was deleted and created again. Its copies are dropped")
            for shard_id, standby in list(self._shards.standbys.items()):
                # A log that is being claimed is checked when it is read up to the claim.
                if not standby.is_paused:
                    self._drop(shard_id)

    def deliver(self, shard_id: int, offset: int, answer: Fetched | KafkaError) -> None:
        """Handles the response to a fetch of a shard from an offset."""
        standby = self._shards.standbys.get(shard_id)
        if standby is None or standby.is_paused or self._is_closing:
            return
        if isinstance(answer, KafkaError):
            if offset != standby.reader.fetch_offset:
                return
            if answer.error is Errors.OFFSET_OUT_OF_RANGE:
                self._looking.add(shard_id)
                self._requests.start(self._find_start(shard_id, standby), f"start of shard {shard_id}")
            else:
                standby.failed()
            return
        try:
            standby.fetched(offset, answer.data, answer.high_watermark, self._now_ms())
        except DivergedError as error:
            _logger.warning("The copy of shard %d is dropped, its log is read again: %s", shard_id, error)
            self._drop(shard_id)
        except (CorruptBatchError, LoadError, AssertionError) as error:
            pause = self._pauses.get(shard_id, FIRST_PAUSE_SECONDS)
            self._pauses[shard_id] = min(2 * pause, LONGEST_PAUSE_SECONDS)
            _logger.error(
                "The log of shard %d cannot be followed, and is read again in %.0f s: %s", *(shard_id, pause, error)
            )
            self._drop(shard_id, pause)
        else:
            if standby.lag == 0:
                self._caught_up(shard_id)

    async def _find_start(self, shard_id: int, standby: Standby[Any]) -> None:
        """Begins at the first offset of a log. Drops the standby if it has read something before that."""
        try:
            standby.begin_at(await self._requests.first_offset(shard_id))
        except KafkaError:
            standby.failed()
        except DivergedError as error:
            _logger.warning("The copy of shard %d is dropped, its log is read again: %s", shard_id, error)
            if self._shards.standbys.get(shard_id) is standby:
                self._drop(shard_id)
        finally:
            self._looking.discard(shard_id)
        self._wake()

    def _caught_up(self, shard_id: int) -> None:
        self._pauses.pop(shard_id, None)
        self._behind.discard(shard_id)
        if not self._has_caught_up and not self._making and not self._behind & self._shards.standbys.keys():
            self._has_caught_up = True
            _logger.info("This instance has caught up with the logs of groups: %d standbys", len(self._shards.standbys))

    # Snapshots.

    def save(self, save: Save, reader: UpstreamReader | None) -> Future[bool] | None:
        """Writes a snapshot of a state whose log `reader` knows. Returns None if that is not possible.

        The future has whether the snapshot was written.
        """
        copy = self._copy_of(save, reader) if not self._is_closing else None
        return self._files.write(save.shard_id, copy) if copy is not None and self._files is not None else None

    def save_now(self, save: Save, reader: UpstreamReader | None) -> None:
        """Writes a snapshot in the calling thread."""
        copy = self._copy_of(save, reader)
        if copy is not None and self._files is not None:
            self._files.write_now(save.shard_id, copy)

    def _copy_of(self, save: Save, reader: UpstreamReader | None) -> StandbyCopy | None:
        """Returns a snapshot with the offsets of the upstream."""
        if reader is None or not isinstance(save.note, LogNote):
            return None
        if save.shard_id not in self._shards.standbys:
            # An owner has everything that the log has.
            reader.caught_up(reader.position, self._now_ms())
        mark = reader.mark(save.note)
        if mark is None:
            return None
        taken = save.snapshot
        snapshot = Snapshot(save.note.position, mark.last.next_offset, taken.created_ms, taken.chunks)
        return StandbyCopy(mark.encode(), snapshot)

    # Figures.

    def why_behind(self) -> str | None:
        """Returns a text until all standbys were at the end of their logs for the first time, then None."""
        if self._has_caught_up:
            return None
        figures = self.figures()
        if not figures.shards:
            return None
        return f"this instance has not caught up with the logs of {figures.behind} of {figures.shards} shards yet"

    def figures(self) -> StandbyFigures:
        """Returns the figures of all standbys."""
        now_ms, standbys = self._now_ms(), self._shards.standbys
        followed = standbys.keys() | self._making.keys()
        return StandbyFigures(
            shards=len(followed),
            behind=len(self._behind & followed),
            lag=max((standby.lag or 0 for standby in standbys.values()), default=0),
            lag_ms=max((now_ms - standby.reader.complete_ms for standby in standbys.values()), default=0),
            copies_bytes=sum(self._files.sizes.values()) if self._files is not None else 0,
        )
