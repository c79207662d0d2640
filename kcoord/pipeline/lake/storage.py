# SPDX-License-Identifier: Apache-2.0
"""The tables of a lake, and the notes that say from which inputs each table was made.

    LAKE/bronze/records   LAKE/silver/commits   LAKE/gold/status   ...      tables
    LAKE/_kcoord/format, clusters                                           format of the lake, and what it may hold
    LAKE/_kcoord/cluster=CLUSTER/TABLE.json                                 the note of a table
    LAKE/_kcoord/cluster=CLUSTER/settings.json, cluster_id                  settings of a cluster, and its id
    LAKE/_kcoord/cluster=CLUSTER/ingest.json                                the last batch of `ingest`
    LAKE/_kcoord/cluster=CLUSTER/ingest.lease, tables.lease, ...            who writes now (`lease`)

Theory of operation. A lake holds one or more clusters. The tables have a column `cluster`, by which their files are
laid out first. A `Lake` reads and writes the rows of one cluster, and its frames do not have that column. The name of
a cluster is its id, unless another name was given. A lake of an older release has one cluster, no such column, and its
notes directly in `_kcoord`.

A write replaces the parts of the table's layout for which it has rows, and the parts that its caller names. With
Parquet this happens file by file: a reader may see a table that is partly new while a job writes, and after a crash
until the job runs again. Delta and Iceberg replace all parts in one step.

A job calls `begin` before it replaces a table, which clears `made_from` and `progress` in the note. It calls `set_note`
after the write. If it crashes in between, the note matches no input, so the next run makes the table from all inputs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

import pyarrow as pa
from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from kcoord.pipeline.lake.errors import LakeError, java_reason
from kcoord.pipeline.lake.files import names_in, replace_text
from kcoord.pipeline.lake.formats import Format, check_library, open_store
from kcoord.pipeline.lake.formats.place import LakePlace
from kcoord.pipeline.lake.formats.s3 import HADOOP_FILE_SYSTEM
from kcoord.pipeline.lake.formats.store import CLUSTER, Store, StoredFile
from kcoord.pipeline.lake.lease import Lease
from kcoord.pipeline.lake.session import SHUFFLE_PARTITIONS, SMALL_ROWS
from kcoord.pipeline.lake.tables import TABLES, LakeTable
from kcoord.pipeline.log_files import LONGEST_NAME, join

NOTES: Final = "_kcoord"
DEFAULT_CLUSTER: Final = "default"
"""The name of a cluster whose id is unknown, as that of a copied folder."""
_CLUSTERS: Final = "clusters"
"""The file that a lake has if its tables have the column `cluster`."""
_CLUSTER_ID: Final = "cluster_id"
_MOST_ROWS: Final = 200_000
"""This process writes at most so many rows of `lag`, which has a row per key for each sample."""
_LONGEST_NAME: Final = LONGEST_NAME - len(f"{CLUSTER}=")
_NAME: Final = re.compile(rf"[A-Za-z0-9._-]{{1,{_LONGEST_NAME}}}")
"""Names of clusters, which are parts of the names of folders."""


@dataclass(slots=True)
class TableNote:
    """What a table was made from.

    `version` rises with each write. `made_from` has the inputs and settings that a job compares. `progress` belongs to
    the job that makes the table.
    """

    version: int = 0
    made_from: dict[str, str] = field(default_factory=dict)
    progress: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        content = {"version": self.version, "made_from": self.made_from, "progress": self.progress}
        return json.dumps(content, indent=1, sort_keys=True)


class Lake:
    """The tables of one cluster under a URI: a local path, or any file system that both Spark and pyarrow support.

    The options of an `s3://` URI are those of pyarrow. Spark and the libraries of the formats get the same options.
    """

    def __init__(
        self,
        spark: SparkSession | Callable[[], SparkSession],
        uri: str,
        table_format: Format = Format.PARQUET,
        cluster: str | None = None,
    ) -> None:
        """`spark` may be a function that returns the session, which is called when the session is needed.

        Without `cluster` the lake must have one cluster at most, or `bind` chooses one.
        """
        self._given_spark = spark
        self._given_cluster = cluster
        self.format = table_format
        self._given_uri = uri
        try:
            self._place = LakePlace.of(uri)
        except (ValueError, OSError) as error:
            raise LakeError(f"lake {uri}: {error}") from error
        self.uri = self._place.uri
        self._files = self._place.files
        self._frames: dict[str, tuple[tuple[int, int], DataFrame]] = {}
        """The frame of each table, and the version and revision that it has.

        Spark lists the files of a table for each new frame.
        """
        self._leases: dict[str, Lease] = {}
        self._check_format()
        self._check_cluster()
        if not callable(spark):
            self.check_spark()

    # Clusters.

    @cached_property
    def cluster(self) -> str | None:
        """The name of the cluster; None in a lake of an older release."""
        if not self._has_clusters:
            return None
        if self._given_cluster is not None:
            return self._given_cluster
        names = self.clusters()
        if len(names) > 1:
            raise LakeError(f"lake {self.uri} has the clusters {', '.join(names)}: choose one (--cluster)")
        return names[0] if names else DEFAULT_CLUSTER

    def clusters(self) -> list[str]:
        """Returns the names of the clusters in the lake. A lake of an older release has none."""
        names = names_in(self._files, f"{self._place.root}/{NOTES}")
        return sorted(name.removeprefix(f"{CLUSTER}=") for name in names if name.startswith(f"{CLUSTER}="))

    @property
    def without_records(self) -> str:
        """The text for a cluster without records, because its log is empty, or only samples of it were taken."""
        cluster = f"cluster {self.cluster} of " if self.cluster in self.clusters() else ""
        return f"{cluster}lake {self.uri} has no records: run `ingest` first"

    def check_records(self) -> None:
        """Raises LakeError if the cluster has no records."""
        if self.note("records") is None:
            raise LakeError(self.without_records)

    @property
    def cluster_id(self) -> str | None:
        """The id of the cluster, None if the lake does not have it yet."""
        return self.text(_CLUSTER_ID)

    def bind(self, cluster_id: str | None) -> None:
        """Chooses the cluster with this id, unless one is given, and notes its id. None means that it is unknown.

        Raises LakeError if the chosen cluster has another id, or the id is that of another cluster.
        """
        self.choose(cluster_id)
        if cluster_id is not None and self.cluster_id is None:
            self.replace_text(_CLUSTER_ID, cluster_id)

    def choose(self, cluster_id: str | None) -> None:
        """Does what `bind` does, but does not note the id."""
        if cluster_id is None:
            return
        if self._has_clusters and self._given_cluster is None:
            self._given_cluster = self._name_of(cluster_id)
            self._check_cluster()
        stored = self.cluster_id
        if stored is None and self.cluster is not None:
            name = self._name_of(cluster_id)
            if self._cluster_id_of(name) == cluster_id:
                raise LakeError(
                    f"lake {self.uri} has the cluster {cluster_id} under the name {name} already: "
                    "omit --cluster, or give that name"
                )
        elif stored is not None and stored != cluster_id:
            own = "" if self.cluster is None else f" under the name {self.cluster}"
            hint = "begin another lake" if self.cluster is None else "choose another name (--cluster)"
            raise LakeError(f"lake {self.uri} has the cluster {stored}{own}, not {cluster_id}: {hint}")

    def _name_of(self, cluster_id: str) -> str:
        """Returns the name under which the lake has a cluster, or its id if the cluster is new."""
        ids = {name: self._cluster_id_of(name) for name in self.clusters()}
        if cluster_id in ids.values():
            return next(name for name in ids if ids[name] == cluster_id)
        if [*ids.values()] == [None]:
            (name,) = ids
            # If the id of the only cluster was unknown until now, it is this one. The topic's id would tell another.
            # A first run that failed leaves no records, and its cluster may be any.
            if self._read_text(f"{NOTES}/{CLUSTER}={name}/records.json") is not None:
                return name
        return cluster_id

    def _cluster_id_of(self, name: str) -> str | None:
        return self._read_text(f"{NOTES}/{CLUSTER}={name}/{_CLUSTER_ID}")

    @cached_property
    def _has_clusters(self) -> bool:
        return not self._is_created or self._place.exists(f"{NOTES}/{_CLUSTERS}")

    def _check_cluster(self) -> None:
        """Raises LakeError if the given name cannot be used."""
        name = self._given_cluster
        if name is not None and _NAME.fullmatch(name) is None:
            raise LakeError(f"cluster {name!r}: a name has 1 to {_LONGEST_NAME} letters, digits, '.', '_' and '-'")
        if name is not None and not self._has_clusters:
            raise LakeError(f"lake {self.uri} is of an older release, and has one cluster only: begin another lake")

    @property
    def _notes(self) -> str:
        """The folder of the cluster's notes."""
        return NOTES if self.cluster is None else f"{NOTES}/{CLUSTER}={self.cluster}"

    @cached_property
    def _store(self) -> Store:
        return open_store(lambda: self.spark, self._place, self.format, self.cluster)

    @property
    def notes_uri(self) -> str:
        """The URI of the cluster's folder of notes."""
        return f"{self.uri}/{self._notes}"

    @property
    def is_local(self) -> bool:
        return self._place.is_local

    @cached_property
    def spark(self) -> SparkSession:
        spark = self._given_spark() if callable(self._given_spark) else self._given_spark
        if not self._place.is_local:
            self._check_spark(spark)
        return spark

    def check_spark(self) -> None:
        """Waits for the session. Raises LakeError if Spark cannot read a lake that is not local."""
        _ = self.spark

    @cached_property
    def _is_small_session(self) -> bool:
        return self.spark.conf.get(SHUFFLE_PARTITIONS) == "1"

    @property
    def _fits_one_task(self) -> bool:
        """True if the session and the lake are small. Rows in one partition need no shuffle and no second stage.

        A lake may grow large while a small session follows the log.
        """
        note = self.note("records")
        return self._is_small_session and (note is None or note.progress.get("rows", 0) <= SMALL_ROWS)

    def path(self, table: LakeTable) -> str:
        return f"{self.uri}/{table.layer}/{table.name}"

    def files_uri(self, table: LakeTable) -> str:
        """Returns pyarrow's URI of the cluster's folder in a table of Parquet, with the options of the lake's URI."""
        folder = f"{table.layer}/{table.name}"
        return join(self._given_uri, folder if self.cluster is None else f"{folder}/{CLUSTER}={self.cluster}")

    # Tables.

    def check_tables(self) -> None:
        """Raises LakeError if the catalog or the tables of a format cannot be read."""
        self._create()
        self._store.revision(TABLES["records"])

    def read(self, name: str) -> DataFrame:
        """Returns the table as it is in its current version. It has no rows if it was never made."""
        table = TABLES[name]
        note = self.note(name)
        version = -1 if note is None else note.version, self._store.revision(table)
        cached = self._frames.get(name)
        if cached is None or cached[0] != version:
            frame = self._store.read(table)
            if frame is None:
                frame = self.no_rows(name)
            if self._fits_one_task:
                frame = frame.coalesce(1)
            # `select` would make an object in Java for each name, by several calls.
            cached = self._frames[name] = version, frame.selectExpr(*(f"`{column.name}`" for column in table.columns))
        return cached[1]

    def no_rows(self, name: str) -> DataFrame:
        table = TABLES[name]
        return self.spark.createDataFrame(table.arrow_schema.empty_table(), table.schema)

    def with_cluster(self, frame: DataFrame) -> DataFrame:
        """Adds the name of the cluster to rows of the lake, as the first column."""
        return frame.select(F.lit(self.cluster or self.cluster_id).alias(CLUSTER), "*")

    def write(self, name: str, frame: DataFrame, *, whole: bool = False, parts: Collection[str] = ()) -> None:
        """Replaces the parts of the table's layout for which the frame has rows.

        The parts whose last column of the layout has one of the values `parts` are replaced even by no rows. Replaces
        all rows if `whole`, or if the table has no layout. The frame has the columns of the table
        (`LakeTable.conform`). This process writes the few rows of a small lake itself. Spark would start about ten
        programs per table to set the modes of its files.
        """
        rows = self._few_rows(name, frame) if self._fits_one_task else None
        if rows is not None:
            self._replace_rows(name, rows.cast(TABLES[name].arrow_schema), whole=whole, parts=parts)
            return
        self._create()
        self._frames.pop(name, None)
        self._store.replace(TABLES[name], frame, whole=whole, parts=parts)

    def _few_rows(self, name: str, frame: DataFrame) -> pa.Table | None:
        """Returns the rows to write into a table of a small lake, or None if they may not fit into this process.

        A batch of records counts as part of the lake after it is written.
        """
        if name == "records":
            return None
        if name != "lag":
            return frame.toArrow()
        rows = frame.limit(_MOST_ROWS + 1).toArrow()
        return rows if len(rows) <= _MOST_ROWS else None

    def stored_files(self, name: str) -> list[StoredFile]:
        return self._store.stored_files(TABLES[name])

    def rewrite(self, name: str, frame: DataFrame | None, values: Sequence[str]) -> None:
        """Replaces the rows whose last column of the layout has these values, in one step. None stands for no rows."""
        self._store.rewrite(TABLES[name], frame, values)
        self._frames.pop(name, None)

    def remove_replaced(self, name: str) -> None:
        """Removes the files that rewrites have replaced. Readers that began before these rewrites need them."""
        self._store.remove_replaced(TABLES[name])

    def replace_rows(self, name: str, rows: pa.Table, *, parts: Collection[str] = ()) -> None:
        """Does the same as `write`, without Spark, for a table with a layout."""
        self._replace_rows(name, rows, whole=False, parts=parts)

    def _replace_rows(self, name: str, rows: pa.Table, *, whole: bool, parts: Collection[str]) -> None:
        self._create()
        self._frames.pop(name, None)
        self._store.replace_rows(TABLES[name], rows, whole=whole, parts=parts)

    def append(self, name: str, rows: pa.Table) -> None:
        """Adds rows, which have the columns of the table. This is for samples, which no other table can replace."""
        self._create()
        self._frames.pop(name, None)
        self._store.append(TABLES[name], rows)

    def _check_format(self) -> None:
        """Raises LakeError if the lake was created with another format. The format of a lake never changes."""
        stored = self._read_text(f"{NOTES}/format")
        if stored is not None and stored != self.format:
            raise LakeError(f"lake {self.uri} is kept as {stored}, not as {self.format}; use --format {stored}")
        check_library(self.format)
        self._is_created = stored is not None

    def _create(self) -> None:
        """Stores the format of a new lake. It precedes each write, so opening a misspelt lake leaves nothing there."""
        if self._is_created:
            return
        self._check_format()
        if not self._is_created:
            self._write_text(f"{NOTES}/{_CLUSTERS}", "")
            self._write_text(f"{NOTES}/format", self.format.value)
            self._is_created = True

    def _check_spark(self, spark: SparkSession) -> None:
        """Raises LakeError if Spark cannot read the lake. Spark and pyarrow have file systems of their own."""
        self._create()
        if self._place.s3 is not None:
            settings = self._place.s3.hadoop()
            for key, value in HADOOP_FILE_SYSTEM.items():
                if spark.conf.get(f"spark.hadoop.{key}", None) is None:
                    settings[key] = value
            for key, value in settings.items():
                spark.conf.set(key, value)
        try:
            # The schema of a text file is fixed, but reading it makes Spark look for the file.
            _ = spark.read.text(f"{self.uri}/{NOTES}/format").schema
        except (PySparkException, Py4JError) as error:
            raise LakeError(
                f"lake {self.uri}: Spark cannot read it, but pyarrow can: {java_reason(str(error))}. "
                'docs/guides/pipeline-on-a-cluster.md, "Keep logs and tables on object storage", lists what Spark needs'
            ) from error

    def lease(self, name: str) -> Lease:
        """Returns the lease of what `lease.PURPOSES` names."""
        if name not in self._leases:
            place = f"lake {self.uri}" if self.cluster is None else f"lake {self.uri}, cluster {self.cluster}"
            self._leases[name] = Lease(self._files, f"{self._place.root}/{self._notes}", name, place)
        return self._leases[name]

    # Notes.

    def note(self, name: str) -> TableNote | None:
        text = self.text(f"{name}.json")
        if text is None:
            return None
        with self.parsing(f"{name}.json"):
            content = json.loads(text)
            return TableNote(content["version"], content["made_from"], content["progress"])

    def set_note(self, name: str, note: TableNote) -> None:
        self.replace_text(f"{name}.json", note.to_json())

    def begin(self, name: str) -> None:
        """Clears the note of a table before its parts are replaced. `set_note` follows after the last write."""
        note = self.note(name)
        self.set_note(name, TableNote(0 if note is None else note.version))

    def stored_settings(self) -> dict[str, str]:
        """Returns the stored settings of the lake. A new lake has none."""
        text = self.text("settings.json")
        with self.parsing("settings.json"):
            return {} if text is None else {str(key): str(value) for key, value in json.loads(text).items()}

    def store_settings(self, settings: dict[str, str]) -> None:
        self.replace_text("settings.json", json.dumps(settings, indent=1, sort_keys=True))

    def text(self, name: str) -> str | None:
        """Returns the text of a file in the cluster's folder of notes, or None if there is none."""
        return self._read_text(f"{self._notes}/{name}")

    @contextmanager
    def parsing(self, name: str) -> Iterator[None]:
        """Raises LakeError with the name of a file in the cluster's folder of notes if its text cannot be parsed."""
        try:
            yield
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise LakeError(f"{self.notes_uri}/{name} is damaged: restore it from a backup ({error})") from error

    def names(self, folder: str) -> list[str]:
        """Returns the names of the files in a folder under the cluster's folder of notes."""
        return names_in(self._files, f"{self._place.root}/{self._notes}/{folder}")

    def replace_text(self, name: str, text: str) -> None:
        """Replaces a file in the cluster's folder of notes. A reader sees either the old text or the new text."""
        self._create()
        self._write_text(f"{self._notes}/{name}", text)

    def _read_text(self, path: str) -> str | None:
        if not self._place.exists(path):
            return None
        with self._files.open_input_stream(f"{self._place.root}/{path}") as file:
            return str(file.read().decode())

    def _write_text(self, path: str, text: str) -> None:
        replace_text(self._files, f"{self._place.root}/{path}", text)
