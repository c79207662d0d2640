# SPDX-License-Identifier: Apache-2.0
"""Slowly changing dimensions of type 2: makes spells (rows with a begin and an end) from states at moments.

A state is valid until the next state of the same sequence. Adjacent equal states of a key are one spell.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F


def next_columns(*sequence: str) -> list[str]:
    """Returns `n`, the number of a state in its sequence by `log_offset`, and time and offset of the next state.

    These are null for the last state.
    """
    order = f"(PARTITION BY {', '.join(sequence)} ORDER BY log_offset)"
    return [
        f"row_number() OVER {order} AS n",
        f"lead(timestamp) OVER {order} AS next_timestamp",
        f"lead(log_offset) OVER {order} AS next_offset",
    ]


def spells(states: DataFrame, key: Sequence[str], first: Sequence[str] = ()) -> DataFrame:
    """Returns one row per spell of each key. The columns in `first` have the values of the spell's first state."""
    order = Window.partitionBy(*key).orderBy("n")
    runs = states.withColumn("run", F.col("n") - F.row_number().over(order))
    return runs.groupBy(*key, "run").agg(
        F.min_by("timestamp", "n").alias("from_timestamp"),
        F.max_by("next_timestamp", "n").alias("to_timestamp"),
        F.min("log_offset").alias("from_offset"),
        F.max_by("next_offset", "n").alias("to_offset"),
        *(F.min_by(name, "n").alias(name) for name in first),
    )
