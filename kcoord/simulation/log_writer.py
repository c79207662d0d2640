# SPDX-License-Identifier: Apache-2.0
"""The log writer of a simulated process, in the place of the server's thread and kernel queue.

It goes through the same steps, by the same functions: what does not have to wait is written at once, then a pass makes
all of it durable by the journal, or where that is refused by the logs, and renews the journal. Between any two steps
time goes by, in which the process may end, and then only what the disk kept is left.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from kcoord.server.disk.log_writer import WriteJob, WriteResult, write_durably, write_what_does_not_wait
from kcoord.simulation.loop import SimulatedLoop
from kcoord.simulation.machine import Machine
from kcoord.storage.journal import Appended, DurableAppends, Journal

if TYPE_CHECKING:
    from kcoord.metrics.measures import WriteMeasures


class SimulatedLogWriter:
    """See the module's text. Where early replies are planted, writes count as durable while they are under way."""

    def __init__(
        self,
        simulated: Machine,
        loop: SimulatedLoop,
        deliver: Callable[[list[WriteResult]], None],
        journal: Journal,
    ) -> None:
        self.measures: WriteMeasures | None = None
        self._loop = loop
        self._deliver = deliver
        self._journal = journal
        self._appends = DurableAppends(journal, renewal_bytes=simulated.options.segment_bytes)
        self._delay_ms = simulated.disk_delay_ms
        self._trace = simulated.trace
        self._early_replies = simulated.fault.early_replies
        self._waiting: list[WriteJob] = []
        self._under_way: list[WriteJob] = []

    def submit(self, jobs: list[WriteJob]) -> None:
        write_what_does_not_wait(jobs)
        for job in jobs:
            self._trace.add("append", f"{job.key} {len(job.data)} {zlib.crc32(job.data)}")
        if self._early_replies:
            self._loop.after(1, self._deliver, [WriteResult(job.key, None, len(job.data)) for job in jobs])
        self._waiting += jobs
        if not self._under_way:
            self._begin_pass()

    def close(self, timeout_seconds: float) -> bool:
        return not self._waiting and not self._under_way

    def lose(self, keys: Collection[object]) -> None:
        """The worker that writes these logs dies: what has not reached them never will."""
        for job in (*self._under_way, *self._waiting):
            if job.key in keys and job.written is None:
                job.error = OSError("the worker is gone")

    def _begin_pass(self) -> None:
        self._under_way, self._waiting = self._waiting, []
        if self._under_way:
            self._loop.after(self._delay_ms(), self._write)

    def _write(self) -> None:
        """To the journal, where that takes it; what is not even in a log yet goes the long way."""
        jobs = self._under_way
        appended = [Appended(job.log, job.written, job.data) for job in jobs if job.written is not None]
        if len(appended) == len(jobs) and self._appends.write(appended):
            self._loop.after(self._delay_ms(), self._sync, appended)
        else:
            self._loop.after(self._delay_ms(), self._write_durably)

    def _sync(self, appended: list[Appended]) -> None:
        try:
            self._journal.sync()
        except OSError:
            self._journal.tear()
            self._loop.after(self._delay_ms(), self._write_durably)
            return
        self._appends.note(appended)
        self._finish([job.result() for job in self._under_way])

    def _write_durably(self) -> None:
        self._finish(write_durably(self._under_way, self._appends))

    def _finish(self, results: list[WriteResult]) -> None:
        for result in results:
            self._trace.add("written", f"{result.key} {result.error}")
        if not self._early_replies:
            self._deliver(results)
        if self._appends.is_renewal_due:
            self._trace.add("renew", f"{self._appends.renew()}")
        self._begin_pass()
