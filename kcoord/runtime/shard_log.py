# SPDX-License-Identifier: Apache-2.0
"""The log of a shard: the requests of the shard set, and their outcomes.

Theory of operation
-------------------
The shard set (`kcoord.runtime.shard_set`) does no IO. `ShardSet.poll` returns a `Ready`, and its owner passes the
requests in it to a `ShardLog`. Every method of the log returns at once. The outcome of a request is a call of the shard
set, now or later, with the request's object: that object is the ticket. All calls are made in one thread.

    request of the shard set      outcomes (methods of ShardSet)
    open(load)                    opened, held, failed or fenced
    read(load)                    read (some batches, perhaps the last ones) or failed
    append(append)                written, fenced or unknown; decided for some batches before
    save(save)                    saved
    release(release)              released
    close(shard_id)               none

The contract of every kind of log:

* A claim is exclusive. After `opened`, no other process can append to the shard's log. The log ends at the `end_offset`
  that was passed to `opened`: the batches of an earlier owner are below it, or never reach the log.
* `read` passes whole batches, in the order of the log. The last `read` of a load has `is_end`.
* The shard set has at most one append of a shard in flight. Appends of several shards may share one request.
* `written`: the batches are as durable as the log promises, even if this process ends. The responses leave now.
* `decided`: the log has the provisional batch of an append that is in flight, or has refused it and will never have it.
  All batches of the append before it are in the log, or were refused. Only a log in an upstream refuses batches.
* `ended` and `rewrite` are no outcomes of a request. A log whose transactions end elsewhere passes each marker to
  `ended`, in the order of the log, after the decisions about the batches before it.
* `unknown`: the batches may be in the log or not, and may still arrive there. The shard drops its state and answers
  every waiting request with NOT_COORDINATOR. It serves no request until it has claimed and read its log again. A log
  that can learn the outcome by repeating the append does so before it calls `unknown`.
* `fenced`: another process has claimed the log. The batches are not in it, unless they are before that claim: then the
  other process reads them. The shard is closed and answers NOT_COORDINATOR. It is loaded again only after
  `ShardSet.claim` or a change of leaders.
* Offsets are those of the shard set, which counts its records from the `end_offset` of `opened`. If the log also has
  other records (claims, markers of another coordinator), the log converts the offsets, also in snapshots.
* The log may give up its claim after `close` and `release`. The shard set requests them only while no append and no
  load of the shard is in flight.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from kcoord.runtime.snapshot import Snapshot


@dataclass(slots=True, eq=False)
class Load:
    """One attempt to claim a shard and to read its log."""

    shard_id: int
    with_snapshot: bool
    """False if the snapshot cannot be used; then the whole log is read."""
    offset: int = 0
    """The offset from which to read next."""
    is_dropped: bool = False
    """True if the shard was closed since. The log must not begin to claim, and the outcome does not matter."""


@dataclass(slots=True)
class OpenedLog:
    """A log that was claimed and opened: its offsets, and its snapshot, if there is one."""

    start_offset: int
    end_offset: int
    size_bytes: int = 0
    snapshot: Snapshot | None = None
    unread_bytes: int = 0
    """With a snapshot: the size of the log after it."""
    has_standby: bool = False
    """True if the shard has a standby that has replayed the log from its beginning to `start_offset`."""


@dataclass(slots=True)
class ProvisionalBatch:
    """A batch of a transaction, which the log may refuse."""

    transactional_id: str
    is_stale: bool = False
    """True if the transaction has ended. The log must refuse the batch."""


@dataclass(slots=True, eq=False)
class Append:
    """Whole batches for the log of one shard, with the offsets from `base_offset` to `next_offset` (exclusive)."""

    shard_id: int
    base_offset: int
    next_offset: int
    data: bytes = field(repr=False)
    provisional: Mapping[int, ProvisionalBatch] = field(default_factory=dict)
    """The batches that the log may refuse, by base offset."""


NO_NOTE: Final = ()
"""The note of a log that has nothing to note."""


@dataclass(slots=True, eq=False)
class Save:
    """A snapshot of a shard, which is stored beside the log. All its content is durable in the log.

    `note` is what `ShardSnapshots.note_log` returned when the snapshot began.
    """

    shard_id: int
    snapshot: Snapshot = field(repr=False)
    note: object = field(default=NO_NOTE, repr=False)


@dataclass(slots=True, eq=False)
class Release:
    """Shards that other processes own from now on. If the topic was deleted, `deleted_topic_id` is its id."""

    shard_ids: Sequence[int]
    deleted_topic_id: bytes | None = None


class ShardLog(Protocol):
    """The logs of all shards of one kind. The module docstring has the contract of every method."""

    def open(self, load: Load) -> None:
        """Claims the log of a shard and opens it."""

    def read(self, load: Load) -> None:
        """Reads some batches from `load.offset`."""

    def append(self, append: Append, now_ms: int) -> None:
        """Appends batches to the log of a shard."""

    def save(self, save: Save) -> None:
        """Replaces the snapshot of a shard."""

    def release(self, release: Release) -> None:
        """Gives up shards that this process no longer owns."""

    def close(self, shard_id: int) -> None:
        """Closes the log of a shard. The log may be opened again."""

    def is_empty(self, shard_id: int) -> bool:
        """True if nothing was ever appended for a shard. Such a shard is active at once and its log is not opened."""

    def gained(self, shard_id: int) -> None:
        """Called when a shard moves here from another owner, which may still have the shard's log."""

    def tick(self, now_ms: int) -> None:
        """Does periodic work. Called about once a second."""

    def stop(self) -> None:
        """Called when the process ends. No new work begins after it."""

    def finish(self, saves: Iterator[Save]) -> None:
        """Stores the last snapshots at an orderly stop, while time is left. All appends are durable before the call."""
