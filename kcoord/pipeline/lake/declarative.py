# SPDX-License-Identifier: Apache-2.0
"""The lake as datasets of Spark's declarative pipelines, from the same builders as the jobs.

`records` is a streaming table, and all others are materialized views. A pipeline cannot query a broker and does not
read audit logs. So `ends`, `topics` and `changes` come from the tables that the settings `kcoord.ends`, `kcoord.topics`
and `kcoord.changes` name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from pyspark import pipelines
from pyspark.errors import PySparkValueError
from pyspark.sql import DataFrame, SparkSession

import kcoord.pipeline
from kcoord.pipeline.lake import commits, current
from kcoord.pipeline.lake.builders import BY_LOG_PARTITION, WHOLE, Builder
from kcoord.pipeline.lake.ingest import bronze
from kcoord.pipeline.lake.settings import MS_PER_MINUTE, LakeSettings
from kcoord.pipeline.lake.tables import TABLES


def define() -> None:
    """Registers the datasets with the current pipeline. A file of the pipeline's `libraries` calls it."""
    spark = SparkSession.active()
    kcoord.pipeline.register(spark)
    _expect_accumulators(spark)
    settings, now = _settings(spark)
    log = spark.conf.get("kcoord.log")
    # The function of a dataset must not analyze anything, not even a schema, so the empty tables are made here.
    given = {
        name: (spark.conf.get(f"kcoord.{name}", "") or "", _empty(spark, name))
        for name in ("ends", "topics", "changes")
    }
    no_commits = _empty(spark, "commits")

    @pipelines.table(name="records", comment=TABLES["records"].doc)
    def records() -> DataFrame:
        return bronze(spark.readStream.format("kcoord").option("table", "records").load(log), 0)

    @pipelines.materialized_view(name="commits", comment=TABLES["commits"].doc)
    def all_commits() -> DataFrame:
        rows = spark.read.table("records")
        return commits.build(rows, rows, no_commits, settings)

    @pipelines.materialized_view(name="current_offsets", comment=TABLES["current_offsets"].doc)
    def current_offsets() -> DataFrame:
        return current.build(spark.read.table("commits"))

    for name, (source, empty) in given.items():
        view = pipelines.materialized_view(name=name, comment=TABLES[name].doc)
        view(_given(spark, source, empty))
    for name, builder in {**BY_LOG_PARTITION, **WHOLE}.items():
        view = pipelines.materialized_view(name=name, comment=TABLES[name].doc)
        view(_query(spark, builder, settings, now))


def _empty(spark: SparkSession, name: str) -> DataFrame:
    return spark.createDataFrame([], TABLES[name].schema)


def _given(spark: SparkSession, source: str, empty: DataFrame) -> Callable[[], DataFrame]:
    return lambda: spark.read.table(source) if source else empty


def _expect_accumulators(spark: SparkSession) -> None:
    """Ignores a response that the client of Spark 4.3.0 does not know.

    After a run the server sends the accumulators of the workers that planned Python data sources; they are empty. The
    client would raise an error for them, and a complete run would count as failed.
    """
    client = spark.client
    ask: Callable[..., Iterator[dict[str, object]]] = client.execute_command_as_iterator

    def ask_and_expect(*arguments: object, **options: object) -> Iterator[dict[str, object]]:
        try:
            yield from ask(*arguments, **options)
        except PySparkValueError as error:
            if error.getCondition() != "UNKNOWN_RESPONSE" or "__python_accumulator__" not in str(error):
                raise

    vars(client)["execute_command_as_iterator"] = ask_and_expect


def _query(spark: SparkSession, builder: Builder, settings: LakeSettings, now: datetime) -> Callable[[], DataFrame]:
    return lambda: builder.build({name: spark.read.table(name) for name in builder.inputs}, settings, now)


def _settings(spark: SparkSession) -> tuple[LakeSettings, datetime]:
    """Reads the settings. `kcoord.now` defaults to the current time, since a pipeline cannot query its tables here."""
    minutes = spark.conf.get("kcoord.retention-minutes", "")
    settings = LakeSettings.from_text(
        {},
        retention_ms=int(minutes) * MS_PER_MINUTE if minutes else None,
        expiry_policy=spark.conf.get("kcoord.expiry-policy", "") or None,
    )
    text = spark.conf.get("kcoord.now", "")
    now = datetime.fromisoformat(text) if text else datetime.now(UTC)
    return settings, now if now.tzinfo else now.replace(tzinfo=UTC)
