# SPDX-License-Identifier: Apache-2.0
"""The jobs: each updates its tables, and the tables that these are made from, to the current state of bronze.

| table | what a run reads |
|---|---|
| bronze.records | the new records of the log, exactly once (`ingest`) |
| silver.commits | the new micro-batches |
| gold.current_offsets | itself and the new commits |
| the other silver tables | the log partitions that have new group records |
| the other gold tables | all inputs, if an input or a setting of the table has changed |

Theory of operation. Each table has a note (`storage.TableNote`), which says what it was made from. A run compares the
note with the notes of the inputs and with the settings. If they match, the table stays as it is. Otherwise the run
makes the table and then writes its note. Inputs come first, and a run makes each table at most once.

* After a crash the job is run again. For a table that is replaced, `Lake.begin` clears the note before the first
  write, so the next run makes the table from all its inputs. silver.commits is laid out by micro-batch: the next run
  replaces the micro-batches that the note does not have yet.
* The lease `tables` lets one process at a time make tables: a note says what its table was made from, and another
  job could replace the table meanwhile.
* `ingest` may run meanwhile. A job reads the notes of its inputs before their rows, so rows that arrive later are
  handled by the next run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake import commits, current
from kcoord.pipeline.lake.builders import BY_LOG_PARTITION, WHOLE, Builder, topic_names
from kcoord.pipeline.lake.ingest import GROUP_OFFSET, MAX_TIMESTAMP_MS
from kcoord.pipeline.lake.settings import LakeSettings
from kcoord.pipeline.lake.storage import Lake, TableNote
from kcoord.pipeline.lake.tables import TABLES

JOBS: Final = {
    "current": ("current_offsets",),
    "status": ("lag", "status"),
    "rebalances": ("storms", "convergence", "churn", "hot_groups"),
    "expiry": ("expiry",),
    "orphans": ("orphans",),
    "audit-1327": ("audit_1327",),
    "losses": ("losses", "denials"),
}
"""The tables of each job. The tables that they are made from are updated too."""

COLUMNS: Final = "columns"
"""The entry of a note that changes if a new release gives the table other columns. Old notes do not have it."""
TOPIC_NAMES: Final = "topic_names"
SAMPLED_TOPICS: Final = "topics"
"""The entry in the note of `ends` that changes if the topics of the samples change."""

SILVER: Final = ("commits", "group_epochs", "members", "regexes", "assignments")

_MOST_PLACES: Final = 1_000_000
"""At most this many keys, about 50 MB, are sent to every worker."""
_THREADS: Final = 2
_SOURCES: Final = frozenset({"records", "ends", "brokers", "topics", "descriptions", "audit", "changes", "denials"})
"""Tables that no job makes: `ingest`, samples and copies of audit logs do."""
_INPUTS: Final = {
    "commits": frozenset[str](),
    "current_offsets": frozenset({"commits"}),
    **{name: frozenset(builder.inputs) - _SOURCES for name, builder in {**BY_LOG_PARTITION, **WHOLE}.items()},
}
"""The tables of jobs from which each table is made."""

Progress = Callable[[str], None]


def _is_same(note: TableNote, made_from: dict[str, str]) -> bool:
    """True if the table was made from the same. A note without columns is of a release with the same columns."""
    return {COLUMNS: made_from[COLUMNS], **note.made_from} == made_from


def _with_inputs(names: Iterable[str]) -> list[str]:
    """Returns the tables and all tables that they are made from, each once."""
    ordered: dict[str, None] = {}
    for name in (name for name in names if name not in _SOURCES):
        for needed in [*_with_inputs(_INPUTS[name]), name]:
            ordered[needed] = None
    return [*ordered]


class Jobs:
    """One run over a lake. Calls `on_table` with the name of each table before making it.

    With `is_small` two tables are made at a time. Planning takes most of the time of small tables, and one core.
    """

    def __init__(
        self,
        lake: Lake,
        settings: LakeSettings,
        on_table: Progress = lambda name: None,
        *,
        is_small: bool = False,
    ) -> None:
        self._lake = lake
        self._settings = settings
        self._on_table = on_table
        self._is_small = is_small
        self._ready: set[str] = set()
        self.made: list[str] = []
        """The tables that were not up to date."""

    def again(self) -> Jobs:
        """Returns a new run, which checks every table again."""
        return Jobs(self._lake, self._settings, self._on_table, is_small=self._is_small)

    def run(self, job: str) -> list[str]:
        """Updates the tables of the job. Returns the tables that were not up to date."""
        self._lake.check_records()
        self.ensure_all(JOBS[job])
        return self.made

    def ensure(self, name: str) -> None:
        """Updates one table, after its inputs."""
        self.ensure_all([name])

    def ensure_all(self, names: Iterable[str]) -> None:
        """Updates the tables, after their inputs. Those that no job makes are left as they are.

        Raises LeaseError if another process updates tables for a minute or more.
        """
        with self._lake.lease("tables").held():
            self._ensure_all(names)

    def _ensure_all(self, names: Iterable[str]) -> None:
        pending = [name for name in _with_inputs(names) if name not in self._ready]
        running: dict[Future[None], str] = {}
        with ThreadPoolExecutor(_THREADS if self._is_small else 1) as threads:
            while pending or running:
                # A table waits for its own inputs only, so that no thread is idle while a slow table is made.
                missing = {*pending, *running.values()}
                for name in [name for name in pending if not _INPUTS[name].intersection(missing)]:
                    pending.remove(name)
                    running[threads.submit(self._update, name)] = name
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    done.result()  # an error of a table is raised here
                    self._ready.add(running.pop(done))

    def _update(self, name: str) -> None:
        if name == "commits":
            self._grow_commits()
        elif name == "current_offsets":
            self._grow_current()
        elif name in BY_LOG_PARTITION:
            self._refresh(name, BY_LOG_PARTITION[name])
        else:
            self._remake(name, WHOLE[name])

    def now(self) -> datetime:
        """Returns the moment of the settings, or else the newest timestamp of records and samples in the lake."""
        if self._settings.now is not None:
            return self._settings.now
        newest_ms = self._records().progress.get(MAX_TIMESTAMP_MS, 0)
        ends = self._lake.note("ends")
        if ends is not None:
            newest_ms = max(newest_ms, ends.progress.get(MAX_TIMESTAMP_MS, 0))
        return datetime.fromtimestamp(newest_ms / 1000, UTC)

    def _records(self) -> TableNote:
        return self._lake.note("records") or TableNote()

    def _begin(self, name: str) -> None:
        self._lake.lease("tables").check()
        self._lake.begin(name)

    def _set_note(self, name: str, note: TableNote) -> None:
        self._lake.lease("tables").check()
        self._lake.set_note(name, note)

    def _made(self, name: str) -> None:
        self.made.append(name)
        self._on_table(name)

    # Tables that grow.

    def _grow_commits(self) -> None:
        note = self._lake.note("commits") or TableNote()
        made_from = {"retention_ms": str(self._settings.retention_ms), COLUMNS: TABLES["commits"].digest}
        done = note.progress.get("batch", -1) if _is_same(note, made_from) else -1
        newest = self._records().progress.get("batch", -1)
        if done >= newest:
            return
        self._made("commits")
        records = self._lake.read("records").where(F.col("batch") <= newest)
        history = (
            self._lake.no_rows("commits") if done < 0 else self._lake.read("commits").where(F.col("batch") <= done)
        )
        rows = commits.build(records.where(F.col("batch") > done), records, history, self._settings)
        # The layout is by batch, so this replaces what a killed run left, and no older batch.
        if done < 0:
            self._begin("commits")
        self._lake.write("commits", rows, whole=done < 0)
        self._set_note("commits", TableNote(note.version + 1, made_from, {"batch": newest}))

    def _grow_current(self) -> None:
        note = self._lake.note("current_offsets") or TableNote()
        newest = (self._lake.note("commits") or TableNote()).progress["batch"]
        made_from = {COLUMNS: TABLES["current_offsets"].digest}
        done = note.progress.get("batch", -1) if _is_same(note, made_from) else -1
        if done >= newest:
            return
        self._made("current_offsets")
        rows = self._lake.read("commits").where((F.col("batch") > done) & (F.col("batch") <= newest))
        if not self._is_small:
            places = current.last_places(rows).localCheckpoint()
            if places.count() <= _MOST_PLACES:
                rows = current.at_places(rows, places)
        # The table is read and replaced at once, so its rows are copied first.
        before = None if done < 0 else self._lake.read("current_offsets").localCheckpoint()
        table = current.build(rows, before)
        self._begin("current_offsets")
        self._lake.write("current_offsets", table)
        self._set_note("current_offsets", TableNote(note.version + 1, made_from, {"batch": newest}))

    # Tables that are rebuilt, in part or as a whole.

    def _refresh(self, name: str, builder: Builder) -> None:
        note = self._lake.note(name) or TableNote()
        made_from = self._names(note) if "ends" in builder.inputs else {TOPIC_NAMES: ""}
        made_from = {**made_from, COLUMNS: TABLES[name].digest}
        same_names = note.made_from.get(TOPIC_NAMES) == made_from[TOPIC_NAMES]
        same_columns = note.made_from.get(COLUMNS, made_from[COLUMNS]) == made_from[COLUMNS]
        done = note.progress if same_names and same_columns else {}
        newest = {key: value for key, value in self._records().progress.items() if key.startswith(GROUP_OFFSET)}
        stale = [int(key.removeprefix(GROUP_OFFSET)) for key, value in newest.items() if done.get(key) != value]
        if not stale:
            if note.made_from != made_from:
                self._set_note(name, TableNote(note.version, made_from, note.progress))
            return
        self._made(name)
        inputs = self._inputs(builder)
        inputs["records"] = inputs["records"].where(F.col("log_partition").isin(stale))
        self._begin(name)
        rows = builder.build(inputs, self._settings, self.now())
        # A log partition whose last regular expression is gone has no rows any more.
        self._lake.write(name, rows, whole=len(stale) == len(newest), parts=[*map(str, stale)])
        self._set_note(name, TableNote(note.version + 1, made_from, newest))

    def _names(self, note: TableNote) -> dict[str, str]:
        """Returns a digest of the topic names, which may become known after the assignments that need them.

        The names are those in commits and in samples. The digest of the note counts if neither has new names since.
        """
        commits, ends = self._lake.note("commits") or TableNote(), self._lake.note("ends") or TableNote()
        sources = {"commits": str(commits.version), "ends": ends.made_from.get(SAMPLED_TOPICS, str(ends.version))}
        if sources.items() <= note.made_from.items():
            return note.made_from
        names = topic_names(self._lake.read("commits"), self._lake.read("ends"))
        digest = names.agg(F.sum(F.xxhash64("topic_id", "topic").cast("decimal(38,0)"))).collect()[0][0]
        return {**sources, TOPIC_NAMES: str(digest)}

    def _remake(self, name: str, builder: Builder) -> None:
        note = self._lake.note(name) or TableNote()
        made_from = {table: str((self._lake.note(table) or TableNote()).version) for table in builder.inputs}
        settings = {**self._settings.to_text(), "now": self.now().isoformat()}
        made_from |= {key: settings[key] for key in builder.uses} | {COLUMNS: TABLES[name].digest}
        if _is_same(note, made_from):
            return
        self._made(name)
        frame = builder.build(self._inputs(builder), self._settings, self.now())
        self._begin(name)
        self._lake.write(name, frame)
        self._set_note(name, TableNote(note.version + 1, made_from))

    def _inputs(self, builder: Builder) -> dict[str, DataFrame]:
        return {table: self._lake.read(table) for table in builder.inputs}
