# SPDX-License-Identifier: Apache-2.0
"""Small operations on frames that Spark does not analyze at once.

A declarative pipeline describes its datasets before their inputs exist. `distinct`, `fillna` and `drop` would fail
then.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def unique(frame: DataFrame, *columns: str) -> DataFrame:
    """Returns the distinct values of the columns."""
    return frame.groupBy(*columns).agg(F.count("*").alias("rows")).select(*columns)


def with_zeros(frame: DataFrame, *columns: str) -> DataFrame:
    """Replaces null by 0 in the columns."""
    for name in columns:
        frame = frame.withColumn(name, F.coalesce(name, F.lit(0)))
    return frame
