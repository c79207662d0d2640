# SPDX-License-Identifier: Apache-2.0
"""Where the tables of a lake are, in which format, and which version of each was made from which inputs.

    LAKE/bronze/records   LAKE/silver/commits   LAKE/gold/status   ...      tables
    LAKE/_kcoord/TABLE.json                                                 what the table was made from
    LAKE/_kcoord/checkpoint                                                 how far `ingest` has read

A table is replaced partition by partition of its layout. Parquet does that file by file: a reader may see a table that
is half new while a job writes, and after a kill until the job runs again. Delta and Iceberg replace in one step.

The note of a table forgets what it was made from before the table is written, and learns it again after that. A job
that was killed in between makes the table again from all there is: the next run ends with the right table.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final

from pyarrow import fs
from pyspark.sql import DataFrame, SparkSession

from kcoord.pipeline.lake.files import file_system
from kcoord.pipeline.lake.tables import TABLES, Table

NOTES: Final = "_kcoord"
ICEBERG_CATALOG: Final = "kcoord"
"""Name of the Iceberg catalog that a session is expected to have (`spark.sql.catalog.kcoord`)."""


class Format(StrEnum):
    """How tables are kept. Delta and Iceberg need their libraries in the session."""

    PARQUET = "parquet"
    DELTA = "delta"
    ICEBERG = "iceberg"


_WITHOUT_DICTIONARY: Final = {
    f"parquet.enable.dictionary#{name}": "false"
    for name in ("log_offset", "effective_offset", "timestamp", "effective_timestamp", "commit_timestamp")
}
"""Nearly every row has another value there, so that a dictionary is begun, filled and given up for nothing."""


class LakeError(Exception):
    """What the user of a lake is told."""


@dataclass(slots=True)
class Note:
    """What a table was made from: `version` rises with each write, `made_from` is compared, `progress` is the job's."""

    version: int = 0
    made_from: dict[str, str] = field(default_factory=dict)
    progress: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        content = {"version": self.version, "made_from": self.made_from, "progress": self.progress}
        return json.dumps(content, indent=1, sort_keys=True)


class Lake:
    """The tables under one URI: a local path, or any file system that both Spark and pyarrow know."""

    def __init__(self, spark: SparkSession, uri: str, table_format: Format = Format.PARQUET) -> None:
        self.spark = spark
        self.uri = uri.rstrip("/")
        self.format = table_format
        try:
            self._files, self._root = file_system(self.uri)
        except (ValueError, OSError) as error:
            raise LakeError(f"lake {uri}: {error}") from error
        self._check_format()

    def path(self, table: Table) -> str:
        return f"{self.uri}/{table.layer}/{table.name}"

    @property
    def checkpoint(self) -> str:
        return f"{self.uri}/{NOTES}/checkpoint"

    def has_checkpoint(self) -> bool:
        return self._exists(f"{self._root}/{NOTES}/checkpoint/offsets")

    # Tables.

    def read(self, name: str) -> DataFrame:
        """The table; without rows where it was never made."""
        table = TABLES[name]
        if not self._is_there(table):
            return self.spark.createDataFrame([], table.schema)
        if self.format is Format.ICEBERG:
            return self.spark.table(self._identifier(table))
        reader = self.spark.read.format(self.format.value)
        if self.format is Format.PARQUET:
            reader = reader.schema(table.schema)
        return table.conform(reader.load(self.path(table)))

    def write(self, name: str, frame: DataFrame) -> None:
        """Replaces those partitions of the table's layout that the frame has rows of; all of an unpartitioned table."""
        table = TABLES[name]
        frame = table.conform(frame)
        if self.format is Format.ICEBERG:
            self._write_iceberg(table, frame)
            return
        writer = frame.write.format(self.format.value).mode("overwrite").options(**_WITHOUT_DICTIONARY)
        if table.partitioned_by:
            writer = writer.partitionBy(*table.partitioned_by).option("partitionOverwriteMode", "dynamic")
        writer.save(self.path(table))

    def append(self, name: str, frame: DataFrame) -> None:
        """Adds rows; for samples, which nothing else can give again."""
        table = TABLES[name]
        frame = table.conform(frame)
        if self.format is Format.ICEBERG and self.spark.catalog.tableExists(self._identifier(table)):
            frame.writeTo(self._identifier(table)).append()
        elif self.format is Format.ICEBERG:
            self._write_iceberg(table, frame)
        else:
            writer = frame.write.format(self.format.value).mode("append").partitionBy(*table.partitioned_by)
            writer.save(self.path(table))

    def _write_iceberg(self, table: Table, frame: DataFrame) -> None:
        writer = frame.writeTo(self._identifier(table))
        if self.spark.catalog.tableExists(self._identifier(table)):
            writer.overwritePartitions()
            return
        self.spark.sql(f"CREATE NAMESPACE IF NOT EXISTS {ICEBERG_CATALOG}.{table.layer}")
        writer = writer.using("iceberg")
        if table.partitioned_by:
            writer = writer.partitionedBy(*(frame[name] for name in table.partitioned_by))
        writer.create()

    def _identifier(self, table: Table) -> str:
        return f"{ICEBERG_CATALOG}.{table.layer}.{table.name}"

    def _is_there(self, table: Table) -> bool:
        if self.format is Format.ICEBERG:
            return bool(self.spark.catalog.tableExists(self._identifier(table)))
        return self._exists(f"{self._root}/{table.layer}/{table.name}")

    def _check_format(self) -> None:
        """A lake keeps the format with which it was begun."""
        place = f"{self._root}/{NOTES}/format"
        if self._exists(place):
            with self._files.open_input_stream(place) as file:
                known = file.read().decode()
            if known != self.format:
                raise LakeError(f"lake {self.uri} is kept as {known}, not as {self.format}")
        else:
            self._replace(place, self.format.value)

    # Notes.

    def note(self, name: str) -> Note | None:
        place = self._note_place(name)
        if not self._exists(place):
            return None
        with self._files.open_input_stream(place) as file:
            content = json.loads(file.read())
        return Note(content["version"], content["made_from"], content["progress"])

    def set_note(self, name: str, note: Note) -> None:
        self._replace(self._note_place(name), note.to_json())

    def begin(self, name: str) -> None:
        """From here on until `set_note` the table may be half old."""
        note = self.note(name)
        self.set_note(name, Note(0 if note is None else note.version))

    def stored_settings(self) -> dict[str, str]:
        """The settings with which the lake was last made; empty for a new one."""
        place = f"{self._root}/{NOTES}/settings.json"
        if not self._exists(place):
            return {}
        with self._files.open_input_stream(place) as file:
            content = json.loads(file.read())
        return {str(key): str(value) for key, value in content.items()}

    def store_settings(self, settings: dict[str, str]) -> None:
        self._replace(f"{self._root}/{NOTES}/settings.json", json.dumps(settings, indent=1, sort_keys=True))

    def _note_place(self, name: str) -> str:
        return f"{self._root}/{NOTES}/{name}.json"

    def _exists(self, place: str) -> bool:
        return self._files.get_file_info(place).type is not fs.FileType.NotFound

    def _replace(self, place: str, text: str) -> None:
        """A reader sees the old text or the new one."""
        self._files.create_dir(place.rpartition("/")[0])
        with self._files.open_output_stream(f"{place}.new") as file:
            file.write(text.encode())
        self._files.move(f"{place}.new", place)
