# SPDX-License-Identifier: Apache-2.0
"""Small questions to frames, in forms that Spark does not analyze at once. The datasets of a declarative pipeline are
described before their inputs are there: `distinct`, `fillna` and `drop` fail then.
"""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def unique(frame: DataFrame, *columns: str) -> DataFrame:
    """The different values of the columns."""
    return frame.groupBy(*columns).agg(F.count("*").alias("rows")).select(*columns)


def with_zeros(frame: DataFrame, *columns: str) -> DataFrame:
    """0 for what is null in the columns."""
    for name in columns:
        frame = frame.withColumn(name, F.coalesce(name, F.lit(0)))
    return frame
