# SPDX-License-Identifier: Apache-2.0
"""Slowly changing dimensions of type 2: makes spells (rows with a begin and an end) from states at moments.

A state is valid until the next state of the same sequence. Adjacent equal states of a key are one spell.
"""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import Column, DataFrame, Window
from pyspark.sql import functions as F


def with_next(states: DataFrame, sequence: Sequence[str | Column]) -> DataFrame:
    """Adds `n`, the number of each state in its sequence by `log_offset`, and time and offset of the next state.

    These are null for the last state.
    """
    order = Window.partitionBy(*sequence).orderBy("log_offset")
    return states.withColumns(
        {
            "n": F.row_number().over(order),
            "next_timestamp": F.lead("timestamp").over(order),
            "next_offset": F.lead("log_offset").over(order),
        }
    )


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
