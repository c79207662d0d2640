# SPDX-License-Identifier: Apache-2.0
"""Consumer group logs as tables: `spark.read.format("kcoord")` over the logs of kcoord and of Apache Kafka.

Needs Java 17, and `pip install '.[spark]'` in a checkout of kcoord. docs/pipeline.md explains tables and options.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def register(spark: SparkSession) -> None:
    """Registers the format `kcoord` in a session.

    The format supports filter pushdown if `spark.sql.python.filterPushdown.enabled` is true at the time of the call.
    """
    from kcoord.pipeline.source import register as register_source

    register_source(spark)
