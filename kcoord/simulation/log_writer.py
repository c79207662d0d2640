# SPDX-License-Identifier: Apache-2.0
"""The log writer of a simulated process, in place of the server's writer thread and kernel queue.

Theory of operation
-------------------
The steps and their functions are those of `kcoord.server.disk.log_writer`; only the waiting is simulated.

1. `submit` appends at once the batches that need no blocking work (`write_what_does_not_wait`), and queues the jobs.
2. A pass takes all queued jobs. One pass runs at a time; jobs that are submitted meanwhile wait for the next pass.
3. If all jobs of the pass are in their logs, the pass writes them to the journal and syncs the journal. If the journal
   refuses them, if its sync fails, or if a job is not in its log yet, the logs themselves are written and synced
   (`write_durably`).
4. The pass delivers its results, renews the journal if that is due, and starts the next pass.

Virtual time passes between any two steps. If the process ends there, the remaining steps never run, and only what the
disk kept is left.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING

from kcoord.server.disk.log_writer import WriteJob, write_durably, write_what_does_not_wait
from kcoord.simulation.loop import SimulatedLoop
from kcoord.simulation.machine import Machine
from kcoord.storage.journal import Appended, DurableAppends, Journal

if TYPE_CHECKING:
    from kcoord.metrics.measures import WriteMeasures


class SimulatedLogWriter:
    """Makes batches durable step by step. With the fault `early_replies`, it reports success before the sync."""

    def __init__(
        self,
        simulated: Machine,
        loop: SimulatedLoop,
        deliver: Callable[[list[WriteJob]], None],
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
            self._loop.after(1, self._deliver, [replace(job, error=None) for job in jobs])
        self._waiting += jobs
        if not self._under_way:
            self._begin_pass()

    def close(self, timeout_seconds: float) -> bool:
        return not self._waiting and not self._under_way

    def lose(self, keys: Collection[object]) -> None:
        """Fails all jobs of these logs that are not in their logs yet, as if their worker had died."""
        for job in (*self._under_way, *self._waiting):
            if job.key in keys and job.written is None:
                job.error = OSError(f"the worker that writes {job.key} has ended")

    def _begin_pass(self) -> None:
        self._under_way, self._waiting = self._waiting, []
        if self._under_way:
            self._loop.after(self._delay_ms(), self._write)

    def _write(self) -> None:
        """Writes the batches to the journal if all of them are in their logs and the journal accepts them."""
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
        self._finish(self._under_way)

    def _write_durably(self) -> None:
        write_durably(self._under_way, self._appends)
        self._finish(self._under_way)

    def _finish(self, jobs: list[WriteJob]) -> None:
        for job in jobs:
            self._trace.add("written", f"{job.key} {job.error}")
        if not self._early_replies:
            self._deliver(jobs)
        if self._appends.is_renewal_due:
            self._trace.add("renew", f"{self._appends.renew()}")
        self._begin_pass()
