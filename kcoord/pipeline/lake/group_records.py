# SPDX-License-Identifier: Apache-2.0
"""The records of groups in bronze.records, with their values as columns.

Epochs and generations start again when a group is created again. So groups with the same name are distinguished by
their incarnation, the number of earlier tombstones in the log that ended a group of this name.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_type

from kcoord.pipeline.schemas import VALUES

_COLUMNS: Final = (
    "log_partition",
    "log_offset",
    "timestamp",
    "record_type",
    "key",
    "group",
    "member_id",
    "is_tombstone",
    "tombstone_reason",
    "tombstone_principal",
    "group_end",
)
_EARLIER: Final = "(PARTITION BY group ORDER BY log_offset ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"
_VALUES: Final = tuple(
    f"from_json(if(record_type = {record_type}, value_json, NULL), "
    f"'{from_arrow_type(value.type).simpleString()}') AS {value.name}"
    for record_type, value in VALUES.items()
)


def group_records(records: DataFrame) -> DataFrame:
    """Returns the group records of some log partitions, with `incarnation` and a column per type of record.

    These columns are named as in `VALUES`, and null in the records of other types.
    """
    incarnation = f"count_if(group_end) OVER {_EARLIER} AS incarnation"
    return records.where("kind = 'group'").selectExpr(*_COLUMNS, incarnation, *_VALUES)
