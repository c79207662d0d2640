# SPDX-License-Identifier: Apache-2.0
"""One run of a job of `kcoord lake`: opens the lake, copies what is new in the log, and starts Spark meanwhile.

Everything that can be wrong with the log or the brokers is found before the lake is touched and before Spark starts.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from kcoord.cli.lake_output import own_error, print_made
from kcoord.cli.lake_source import LakeSource, source_of
from kcoord.cli.session import warn
from kcoord.cli.stopping import stop_on_signals
from kcoord.pipeline.errors import BrokerUnavailableError
from kcoord.pipeline.lake.audit import check_audit_log, copy_audit_log
from kcoord.pipeline.lake.errors import LakeError, TablesUnavailableError
from kcoord.pipeline.lake.formats import Format
from kcoord.pipeline.lake.ingest import Ingest, Ingested
from kcoord.pipeline.lake.jobs import SILVER, Jobs
from kcoord.pipeline.lake.lease import LeaseError
from kcoord.pipeline.lake.samples import add_sample
from kcoord.pipeline.lake.session import SMALL_ROWS, get_session
from kcoord.pipeline.lake.settings import MS_PER_MINUTE, LakeSettings
from kcoord.pipeline.lake.storage import Lake

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from kcoord.pipeline.lake.samples import Retention

_SMALL_BYTES: Final = 64 << 20
"""With less log to read and a small lake a job takes seconds, and starting Spark is most of them."""
_DESCRIBE_SECONDS: Final = 60.0
"""The least time between two samples with descriptions of all groups, which cost the coordinators most.

Also that between two questions for a retention that the brokers do not tell.
"""


class LakeRun:
    """The lake of a command and the jobs over it. `source` is its log, if the command names one.

    With `json_progress`, standard output gets a JSON line per batch that is copied. It is for `ingest` alone: other
    commands print their answer there.
    """

    def __init__(self, options: argparse.Namespace, *, json_progress: bool = False) -> None:
        self._options = options
        self._json_progress = json_progress
        self._starting: Future[SparkSession] | None = None
        self._began = time.monotonic()
        self._described_at = float("-inf")
        self._retention_asked_at = float("-inf")
        self._retention: Retention | None = None
        self._read_bytes = 0
        self.source = source_of(options)
        if self.source is not None:
            self.source.check(may_be_missing=getattr(options, "follow", None) is not None)
        for audit_log in options.audit:
            check_audit_log(audit_log)
        self._lakes = [self._open(options.cluster)]
        self._ingest = None if self.source is None else Ingest(self._lakes[0], self.source.options)
        names = self._lakes[0].clusters()
        if self.source is None and options.cluster is None:
            self._lakes = self._lakes if len(names) < 2 else [self._open(name) for name in names]
        elif self.source is None and options.cluster not in names:
            own = ", ".join(names) or "none"
            raise LakeError(f"lake {options.lake} has no cluster {options.cluster}; it has {own}")
        self._is_small = self._takes_seconds()

    @property
    def lake(self) -> Lake:
        """The only cluster of the lake. Raises LakeError if it has several and none is chosen."""
        if len(self._lakes) > 1:
            names = ", ".join(str(lake.cluster) for lake in self._lakes)
            raise LakeError(f"lake {self._options.lake} has the clusters {names}: choose one with --cluster")
        return self._lakes[0]

    def each_cluster(self) -> Iterator[tuple[Lake, Jobs]]:
        """Yields the lake and the jobs of each cluster that the command is about. Leaves out those without records.

        Raises LakeError if no cluster has records.
        """
        lakes = [lake for lake in self._lakes if lake.note("records") is not None]
        if not lakes:
            self._lakes[0].check_records()
        for lake in self._lakes:
            if lake in lakes:
                yield lake, self.jobs(lake)
            else:
                warn(lake.without_records)

    def jobs(self, lake: Lake) -> Jobs:
        """Returns a new run of the jobs of a cluster."""
        return Jobs(lake, self._settings(lake), print_made, is_small=self._is_small)

    def _open(self, cluster: str | None) -> Lake:
        return Lake(self._session, self._options.lake, Format(self._options.format), cluster)

    def copy_new_records(self) -> None:
        """Copies the log up to its present end, with a sample of the brokers, and audit logs.

        Starts Spark, unless there is nothing to answer from.
        """
        self._copy_audit_logs()
        if self._ingest is None:
            if any(lake.note("records") is not None for lake in self._lakes):
                self._start_spark()
            return
        with self._ingest.alone():
            self._ingest.stop_at_present_ends()
            self._begin()
            self._add_sample()
            while (done := self._ingest.next()) is not None:
                self._report(done)

    def update_silver(self) -> None:
        """Updates the silver tables, if there are records."""
        if self.lake.note("records") is not None:
            self.jobs(self.lake).ensure_all(SILVER)

    def follow(self, interval_s: float) -> None:
        """Copies what is new at this interval, with a sample each time, until a signal. Ends between two steps.

        If brokers, or the tables of Delta or Iceberg, cannot be reached later than at the start, it tries again.
        """
        ingest = self._ingest
        assert ingest is not None
        self.lake.check_tables()
        with ingest.alone(), stop_on_signals() as stop:
            self._begin()
            while not stop.is_set():
                due = time.monotonic() + interval_s
                try:
                    self._copy_audit_logs_if_possible()
                    self._add_sample()
                    while not stop.is_set() and (done := ingest.next()) is not None:
                        self._report(done)
                        self._update_silver_now()
                except (BrokerUnavailableError, TablesUnavailableError, PySparkException, Py4JError) as error:
                    reason = _reason_of_outage(error)
                    if reason is None:
                        raise
                    warn(f"{reason}; trying again")
                stop.wait(max(due - time.monotonic(), 0))

    def _update_silver_now(self) -> None:
        """Updates the silver tables, unless another job updates tables. A later batch or job does it then."""
        try:
            with self.lake.lease("tables").held(0):
                self.update_silver()
        except LeaseError as error:
            warn(f"{error}; copying continues")

    def _copy_audit_logs_if_possible(self) -> None:
        """Copies audit logs, unless another process does. The log is copied even if one of them is missing."""
        try:
            self._copy_audit_logs(wait_s=0)
        except (LakeError, FileNotFoundError) as error:
            warn(f"{error}; trying again")

    def _copy_audit_logs(self, wait_s: float | None = None) -> None:
        for audit_log in self._options.audit:
            entries = copy_audit_log(self.lake, audit_log, wait_s)
            if entries and not self._options.json:
                print(f"{audit_log}: {entries:,} new entries", file=sys.stderr)

    def _begin(self) -> None:
        """Starts Spark. Waits for it if it has to show that it can read a lake on object storage."""
        self._start_spark()
        if not self.lake.is_local:
            self.lake.check_spark()

    def _takes_seconds(self) -> bool:
        """True if the log and the lake are so small that starting Spark would take most of the time."""
        notes = [lake.note("records") for lake in self._lakes]
        rows = sum(note.progress.get("rows", 0) for note in notes if note is not None)
        left_bytes = 0 if self._ingest is None else sum(self._ingest.left_bytes().values())
        return left_bytes <= _SMALL_BYTES and rows <= SMALL_ROWS

    def _start_spark(self) -> Future[SparkSession]:
        """Starts Spark in a thread, so that this one can read meanwhile."""
        if self._starting is None:
            self._starting = ThreadPoolExecutor(1).submit(session_of, self._options, is_small=self._is_small)
        return self._starting

    def _session(self) -> SparkSession:
        return self._start_spark().result()

    def _settings(self, lake: Lake) -> LakeSettings:
        """Merges the stored settings of the lake with those of the options and of the brokers, and stores these.

        A default is not stored, so the brokers are asked until they tell their retention.
        """
        options, stored = self._options, lake.stored_settings()
        minutes, policy = options.retention_minutes, options.expiry_policy
        if minutes is None and self.source is not None and "retention_ms" not in stored:
            told = self._told_retention(self.source)
            minutes = None if told is None else told.minutes
            if told is not None and policy is None and "expiry_policy" not in stored:
                policy = told.policy.value
        given = {
            "retention_ms": None if minutes is None else minutes * MS_PER_MINUTE,
            "expiry_policy": policy,
            "storm_epochs": options.storm_epochs,
            "storm_window_ms": options.storm_window_ms,
        }
        settings = LakeSettings.from_text(stored, **given)
        merged = {**stored, **{name: str(value) for name, value in given.items() if value is not None}}
        if merged != stored and lake.note("records") is not None:
            lake.store_settings(merged)
        return settings if options.now is None else replace(settings, now=options.now)

    def _told_retention(self, source: LakeSource) -> Retention | None:
        """Asks the brokers for their retention, at most once a minute. None if they have not told it yet."""
        if self._retention is None and time.monotonic() - self._retention_asked_at >= _DESCRIBE_SECONDS:
            self._retention_asked_at = time.monotonic()
            self._retention = source.retention()
        return self._retention

    def _add_sample(self) -> None:
        if self.source is None or self.source.brokers is None:
            return
        with_groups = time.monotonic() - self._described_at >= _DESCRIBE_SECONDS
        sample = self.source.sample(self.lake, with_groups=with_groups)
        if sample is not None:
            if with_groups and self.lake.note("records") is None:
                self.source.warn_of_gateway(sample)
            add_sample(self.lake, sample)
            self._described_at = time.monotonic() if with_groups else self._described_at

    def _report(self, done: Ingested) -> None:
        self._read_bytes += done.size_bytes
        seconds = max(time.monotonic() - self._began, 1e-3)
        progress = _progress(done, self._read_bytes / seconds)
        if self._json_progress:
            print(json.dumps(progress), flush=True)
        else:
            print(progress_line(progress, done.total / seconds), file=sys.stderr)


def _reason_of_outage(error: Exception) -> str | None:
    """Returns the reason if brokers or tables are away, which a worker of Spark may have found out. Else None."""
    if not isinstance(error, PySparkException | Py4JError):
        return str(error)
    name, reason = own_error(str(error)) or ("", "")
    return reason if name == BrokerUnavailableError.__name__ else None


def session_of(options: argparse.Namespace, *, is_small: bool) -> SparkSession:
    spark = get_session(options.master, dict(options.conf), progress=sys.stderr.isatty(), is_small=is_small)
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def _progress(done: Ingested, bytes_per_second: float) -> dict[str, int]:
    """Returns the numbers of a batch. The time left is an estimate from the bytes that are left."""
    left = sum(done.left_bytes.values())
    return {
        "batch": done.batch,
        "records": done.rows,
        "total": done.total,
        "bytes": done.size_bytes,
        "partitions_behind": len(done.left_bytes),
        "bytes_behind": left,
        "seconds_left": round(left / bytes_per_second) if bytes_per_second else 0,
    }


def progress_line(progress: Mapping[str, int], records_per_second: float) -> str:
    """Returns the line of a batch, with what is left to read if there is anything."""
    line = (
        f"batch {progress['batch']}: {progress['records']:,} records ({progress['bytes'] / 1e6:,.1f} MB), "
        f"{progress['total']:,} in all, {records_per_second:,.0f}/s"
    )
    if not progress["partitions_behind"]:
        return line
    return (
        f"{line}; {progress['partitions_behind']} partitions behind by {progress['bytes_behind'] / 1e6:,.1f} MB, "
        f"about {progress['seconds_left']:,} s left"
    )
