# SPDX-License-Identifier: Apache-2.0
"""Makes appends durable by the journal, and now and then the logs themselves, so that the journal can begin anew.

Where the journal cannot be written each log is synced instead: a log's own sync is always as good. The journal begins
anew only when every log that it stands for is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple, Protocol, TypeAlias

from kcoord.storage.file_system import Bytes
from kcoord.storage.journal import Extent, Journal
from kcoord.storage.log import AppendInfo

RENEWAL_BYTES: Final = 32 << 20
"""As much as a start reads again at most, unless a log cannot be synced."""


class JournaledLog(Protocol):
    """A log that can be synced as long as the process runs, whatever happens to it meanwhile."""

    @property
    def folder(self) -> str:
        """The name of its folder."""

    def sync_names(self) -> None:
        """Makes the names of the log's files durable."""

    def flush(self) -> None:
        """Returns when all that was appended is durable; an exception where it is not."""


class Appended(NamedTuple):
    """An append that is to be made durable."""

    log: JournaledLog
    info: AppendInfo
    data: Bytes


FlushAll: TypeAlias = Callable[[Sequence[JournaledLog]], list[Exception | None]]


def flush_each(logs: Sequence[JournaledLog]) -> list[Exception | None]:
    """One log after the other. What becomes of each: a defect in one must not keep the others waiting."""
    return [_outcome(log.flush) for log in logs]


class DurableAppends:
    """See the module's text. One thread at a time uses it. `flush_all` may sync several logs at a time."""

    def __init__(
        self, journal: Journal, flush_all: FlushAll = flush_each, *, renewal_bytes: int = RENEWAL_BYTES
    ) -> None:
        self._journal = journal
        self._flush_all = flush_all
        self._renewal_bytes = renewal_bytes
        self._next_renewal_bytes = renewal_bytes
        self._unflushed: dict[str, JournaledLog] = {}

    @property
    def is_renewal_due(self) -> bool:
        """It has grown, or it failed: what it holds is durable in the logs soon then."""
        return self._journal.is_torn or self._journal.size_bytes >= self._next_renewal_bytes

    @property
    def is_renewal_useful(self) -> bool:
        """Whether there is something that only the journal has made durable."""
        return bool(self._unflushed)

    def settle(self, appended: Sequence[Appended]) -> list[Exception | None]:
        """When it returns, everything is durable but that of logs with an error."""
        outcomes = [_outcome(log.sync_names) for log, _, _ in appended]
        whole = [number for number, error in enumerate(outcomes) if error is None]
        if not whole:
            return outcomes
        if not self._write_and_sync([appended[number] for number in whole]):
            flushed = self._flush_all([appended[number].log for number in whole])
            for number, error in zip(whole, flushed, strict=True):
                outcomes[number] = error
        return outcomes

    def write(self, appended: Sequence[Appended]) -> bool:
        """For who syncs the journal by himself: whether all is durable after that, and the journal the place for it.
        The names of the files are durable already. `note` follows, or `Journal.tear`.
        """
        if self.is_renewal_due:
            return False
        try:
            self._journal.write(_extents(appended))
        except OSError:
            return False
        return True

    def note(self, appended: Sequence[Appended]) -> None:
        """The journal has made it durable."""
        self._unflushed.update([(log.folder, log) for log, _, _ in appended])

    def _write_and_sync(self, appended: Sequence[Appended]) -> bool:
        """False where the journal takes nothing."""
        if self._journal.is_torn and not self.renew():
            return False
        try:
            self._journal.write(_extents(appended))
            self._journal.sync()
        except OSError:
            return False
        self.note(appended)
        return True

    def renew(self) -> bool:
        """Syncs the logs and begins the journal anew; False where one of them cannot be synced."""
        logs = list(self._unflushed.values())
        errors = self._flush_all(logs)
        self._unflushed = {log.folder: log for log, error in zip(logs, errors, strict=True) if error is not None}
        try:
            if not self._unflushed:
                self._journal.begin_anew()
        except OSError:
            pass
        self._next_renewal_bytes = self._journal.size_bytes + self._renewal_bytes
        return not self._unflushed and not self._journal.is_torn


def _extents(appended: Sequence[Appended]) -> list[Extent]:
    return [Extent(log.folder, info.segment_base_offset, info.position, data) for log, info, data in appended]


def _outcome(action: Callable[[], None]) -> Exception | None:
    try:
        action()
    except Exception as error:
        return error
    return None
