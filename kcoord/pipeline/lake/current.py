# SPDX-License-Identifier: Apache-2.0
"""gold.current_offsets: the newest commit of each key, unless it is a tombstone."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake.commits import KEY
from kcoord.pipeline.lake.tables import TABLES

_VALUES = tuple(column.name for column in TABLES["current_offsets"].columns if column.name not in KEY)


def build(commits: DataFrame, before: DataFrame | None = None) -> DataFrame:
    """Makes the table from commits, and from the table `before` them if there is one."""
    rows = commits.select(*KEY, *_VALUES, "is_tombstone")
    if before is not None:
        rows = rows.unionByName(before.select(*KEY, *_VALUES, F.lit(False).alias("is_tombstone")))
    order = F.struct("effective_offset", "log_offset")
    newest = rows.groupBy(*KEY).agg(F.max_by(F.struct("is_tombstone", *_VALUES), order).alias("newest"))
    values = {name: f"newest.{name}" for name in _VALUES}
    return TABLES["current_offsets"].conform(newest.where("NOT newest.is_tombstone"), **values)


def last_places(commits: DataFrame) -> DataFrame:
    """Returns `log_partition` and `effective_offset` of the newest commit of each key.

    Spark aggregates the maximum of integers in place, while `build` has to sort the rows.
    """
    newest = commits.groupBy("log_partition", *KEY).agg(F.max("effective_offset").alias("effective_offset"))
    return newest.select("log_partition", "effective_offset")


def at_places(commits: DataFrame, places: DataFrame) -> DataFrame:
    """Returns the commits at these places. They are few, and all that `build` needs."""
    return commits.join(F.broadcast(places), ["log_partition", "effective_offset"], "left_semi")
