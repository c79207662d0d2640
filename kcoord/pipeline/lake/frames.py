# SPDX-License-Identifier: Apache-2.0
"""Small operations on frames that Spark does not analyze at once.

A declarative pipeline describes its datasets before their inputs exist. `distinct`, `fillna` and `drop` would fail
then.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame
from pyspark.sql import functions as F


def unique(frame: DataFrame, *columns: str) -> DataFrame:
    """Returns the distinct values of the columns."""
    return frame.groupBy(*columns).agg(F.count("*").alias("rows")).select(*columns)


def with_latest(
    rows: DataFrame, facts: DataFrame, key: Sequence[str], at: str, name: str, order: Sequence[str] = ()
) -> DataFrame:
    """Adds the struct `name`: the latest of the `facts` with the key of the row, at most at the `at` of the row.

    It is null if there is none. Facts with the same `at` are in the order of the columns `order`, and precede rows with
    that `at`. This sorts rows and facts of a key once. A join would compare each row with all facts of its key.
    """
    told = facts.selectExpr(*key, at, *order, f"struct(*) AS {name}")
    asked = rows.selectExpr(*key, at, "struct(*) AS row")
    sequence = f"PARTITION BY {', '.join(key)} ORDER BY {', '.join((at, 'row IS NOT NULL', *order))}"
    both = told.unionByName(asked, allowMissingColumns=True)
    both = both.selectExpr("row", f"last({name}, true) OVER ({sequence} ROWS UNBOUNDED PRECEDING) AS {name}")
    return both.where("row IS NOT NULL").select("row.*", name)
