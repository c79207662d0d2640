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
from typing import Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException
from pyspark.sql import DataFrame, SparkSession

from kcoord.pipeline.lake.errors import LakeError
from kcoord.pipeline.lake.formats import Format, open_store
from kcoord.pipeline.lake.formats.place import LakePlace
from kcoord.pipeline.lake.formats.s3 import HADOOP_FILE_SYSTEM
from kcoord.pipeline.lake.tables import TABLES, LakeTable
from kcoord.pipeline.log_files import join

NOTES: Final = "_kcoord"


@dataclass(slots=True)
class TableNote:
    """What a table was made from: `version` rises with each write, `made_from` is compared, `progress` is the job's."""

    version: int = 0
    made_from: dict[str, str] = field(default_factory=dict)
    progress: dict[str, int] = field(default_factory=dict)

    def to_json(self) -> str:
        content = {"version": self.version, "made_from": self.made_from, "progress": self.progress}
        return json.dumps(content, indent=1, sort_keys=True)


class Lake:
    """The tables under one URI: a local path, or any file system that both Spark and pyarrow know.

    The options of an `s3://` URI are pyarrow's; Spark and the libraries of the formats get the same.
    """

    def __init__(self, spark: SparkSession, uri: str, table_format: Format = Format.PARQUET) -> None:
        self.spark = spark
        self.format = table_format
        self._given_uri = uri
        try:
            self._place = LakePlace.of(uri)
        except (ValueError, OSError) as error:
            raise LakeError(f"lake {uri}: {error}") from error
        self.uri = self._place.uri
        self._files = self._place.files
        self._check_format()
        if not self._place.is_local:
            self._check_spark()
        self._store = open_store(spark, self._place, table_format)

    def path(self, table: LakeTable) -> str:
        return f"{self.uri}/{table.layer}/{table.name}"

    def files_uri(self, table: LakeTable) -> str:
        """The folder of a table as pyarrow names it, with the options of the lake's URI; `path` is Spark's name."""
        return join(self._given_uri, f"{table.layer}/{table.name}")

    @property
    def checkpoint(self) -> str:
        return f"{self.uri}/{NOTES}/checkpoint"

    def has_checkpoint(self) -> bool:
        return self._place.exists(f"{NOTES}/checkpoint/offsets")

    # Tables.

    def read(self, name: str) -> DataFrame:
        """The table; without rows where it was never made."""
        table = TABLES[name]
        found = self._store.read(table)
        return self.spark.createDataFrame([], table.schema) if found is None else table.conform(found)

    def write(self, name: str, frame: DataFrame) -> None:
        """Replaces those partitions of the table's layout that the frame has rows of; all of an unpartitioned table."""
        table = TABLES[name]
        self._store.replace(table, table.conform(frame))

    def append(self, name: str, frame: DataFrame) -> None:
        """Adds rows; for samples, which nothing else can give again."""
        table = TABLES[name]
        self._store.append(table, table.conform(frame))

    def _check_format(self) -> None:
        """A lake keeps the format with which it was begun."""
        known = self._text("format")
        if known is None:
            self._replace("format", self.format.value)
        elif known != self.format:
            raise LakeError(f"lake {self.uri} is kept as {known}, not as {self.format}")

    def _check_spark(self) -> None:
        """Spark has file systems of its own: it must find what pyarrow has just found."""
        if self._place.s3 is not None:
            settings = self._place.s3.hadoop()
            for key, value in HADOOP_FILE_SYSTEM.items():
                if self.spark.conf.get(f"spark.hadoop.{key}", None) is None:
                    settings[key] = value
            for key, value in settings.items():
                self.spark.conf.set(key, value)
        try:
            # The schema is fixed; asking for it makes Spark look for the file.
            assert self.spark.read.text(f"{self.uri}/{NOTES}/format").schema
        except (PySparkException, Py4JError) as error:
            raise LakeError(
                f"lake {self.uri}: Spark cannot read it, but pyarrow can: {_reason(error)}. "
                'docs/pipeline.md, "Object storage", lists the jars and settings that Spark needs'
            ) from error

    # Notes.

    def note(self, name: str) -> TableNote | None:
        text = self._text(f"{name}.json")
        if text is None:
            return None
        content = json.loads(text)
        return TableNote(content["version"], content["made_from"], content["progress"])

    def set_note(self, name: str, note: TableNote) -> None:
        self._replace(f"{name}.json", note.to_json())

    def begin(self, name: str) -> None:
        """From here on until `set_note` the table may be half old."""
        note = self.note(name)
        self.set_note(name, TableNote(0 if note is None else note.version))

    def stored_settings(self) -> dict[str, str]:
        """The settings with which the lake was last made; empty for a new one."""
        text = self._text("settings.json")
        return {} if text is None else {str(key): str(value) for key, value in json.loads(text).items()}

    def store_settings(self, settings: dict[str, str]) -> None:
        self._replace("settings.json", json.dumps(settings, indent=1, sort_keys=True))

    def _text(self, name: str) -> str | None:
        """The text of a note's file; None where there is none."""
        if not self._place.exists(f"{NOTES}/{name}"):
            return None
        with self._files.open_input_stream(f"{self._place.root}/{NOTES}/{name}") as file:
            return str(file.read().decode())

    def _replace(self, name: str, text: str) -> None:
        """A reader sees the old text or the new one."""
        folder = f"{self._place.root}/{NOTES}"
        self._files.create_dir(folder)
        with self._files.open_output_stream(f"{folder}/{name}.new") as file:
            file.write(text.encode())
        self._files.move(f"{folder}/{name}.new", f"{folder}/{name}")


def _reason(error: Exception) -> str:
    """The line of a Java exception that tells the cause, without the stack."""
    lines = [line.strip() for line in str(error).splitlines()]
    causes = [line.removeprefix("Caused by: ") for line in lines if line.startswith("Caused by: ")]
    return causes[-1] if causes else next((line for line in lines if "Exception" in line), lines[0])
