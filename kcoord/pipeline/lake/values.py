# SPDX-License-Identifier: Apache-2.0
"""Parses `value_json` of group records into columns, with the types of the source's schemas."""

from __future__ import annotations

from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_type

from kcoord.pipeline.schemas import VALUES


def with_values(records: DataFrame) -> DataFrame:
    """Adds a column per type of group record, named as in `VALUES`. It is null in the records of other types."""
    columns = {}
    for record_type, value in VALUES.items():
        text = F.when(F.col("record_type") == record_type, F.col("value_json"))
        columns[value.name] = F.from_json(text, from_arrow_type(value.type).simpleString())
    return records.withColumns(columns)
