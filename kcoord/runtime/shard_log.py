# SPDX-License-Identifier: Apache-2.0
"""The log of a shard as the shard set sees it: what it asks for, and how that can end.

Theory of operation
-------------------
The shard set (`kcoord.runtime.shard_set`) does no IO. `ShardSet.poll` returns a `Ready`, and its owner passes what is
in it to a `ShardLog`. A method of the log returns at once. Its outcome is a call of the shard set, now or later, with
the object that the request was made with: that object is the ticket.

    request of the shard set      outcomes (methods of ShardSet)
    open(load)                    opened, held, failed or fenced
    read(load)                    read (some batches, perhaps the last ones) or failed
    append(append)                written, fenced or unknown
    save(save)                    saved
    release(release)              released
    close(shard_id)               none

What each kind of log has to keep:

* A claim is exclusive. From `opened` on nobody else can append to the shard's log, and the log ends at the `end_offset`
  that `opened` was given: whatever an earlier owner had appended is below it, or will never be there.
* `read` returns whole batches in the order of the log. The last call of `read` for a load says that the end is reached.
* The shard set has at most one append of a shard under way. Appends of several shards may share one request.
* `written`: the batches are as durable as the log promises, also after this process ends. Answers leave now.
* `unknown`: the batches may be in the log or not, and may still get there. The shard drops its state, answers everybody
  who waits with NOT_COORDINATOR, and answers nothing else until it has claimed and read its log again. A log that can
  find out, by repeating the same append, does that first.
* `fenced`: another owner has claimed the log, and the batches are not in it. The shard is closed: it answers
  NOT_COORDINATOR, and it is not loaded again before `ShardSet.claim` or a change of leaders asks for it.
* Offsets are those of the shard set: it counts records from the `end_offset` of `opened`. A log in which other records
  lie between (claims, markers of another coordinator) keeps the difference to itself, also in snapshots.
* After `close` and after `release` the claim may be given up. The shard set asks for them only while no append and no
  load of the shard is under way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from kcoord.runtime.snapshot import Snapshot


@dataclass(slots=True, eq=False)
class Load:
    """One attempt to claim a shard and to read its log. `offset` is where to read on."""

    shard_id: int
    with_snapshot: bool
    """False if the snapshot was found to be wrong: the whole log is read then."""
    offset: int = 0


@dataclass(slots=True)
class OpenedLog:
    """What is in a log that was claimed and opened: offsets, and the snapshot to begin with, if there is one."""

    start_offset: int
    end_offset: int
    size_bytes: int = 0
    snapshot: Snapshot | None = None
    unread_bytes: int = 0
    """With a snapshot: the size of the log behind it."""


@dataclass(slots=True, eq=False)
class Append:
    """Whole batches, `base_offset` up to before `next_offset`, for the log of one shard."""

    shard_id: int
    base_offset: int
    next_offset: int
    data: bytes = field(repr=False)


@dataclass(slots=True, eq=False)
class Save:
    """A snapshot of a shard, to be kept beside its log. All that it holds is durable in the log."""

    shard_id: int
    snapshot: Snapshot = field(repr=False)


@dataclass(slots=True, eq=False)
class Release:
    """Shards that others own from now on, or whose topic was deleted: then `deleted_topic_id` is its id."""

    shard_ids: Sequence[int]
    deleted_topic_id: bytes | None = None


class ShardLog(Protocol):
    """The logs of all shards of one kind. The module's text says what each method has to keep."""

    def open(self, load: Load) -> None:
        """Claims the log of a shard and opens it."""

    def read(self, load: Load) -> None:
        """Reads some batches from `load.offset` on."""

    def append(self, append: Append, now_ms: int) -> None:
        """Appends batches to the log of a shard."""

    def save(self, save: Save) -> None:
        """Replaces the snapshot of a shard."""

    def release(self, release: Release) -> None:
        """Lets go of shards for good."""

    def close(self, shard_id: int) -> None:
        """Closes the log of a shard, which may be opened again."""

    def is_empty(self, shard_id: int) -> bool:
        """Whether nothing was ever appended for a shard: then it is active at once, and its log is not opened."""

    def gained(self, shard_id: int) -> None:
        """Another owner had the shard until now. Whether there is a log is known when that owner has let go of it."""

    def tick(self, now_ms: int) -> None:
        """Called about once a second, for periodic work."""

    def stop(self) -> None:
        """The process ends: nothing is begun any more."""

    def finish(self, saves: Iterator[Save]) -> None:
        """At an orderly stop, when everything is durable: keeps the last snapshots, as long as there is time."""
