# SPDX-License-Identifier: Apache-2.0
"""Consumer group logs as tables: `spark.read.format("kcoord")` over the logs of kcoord and of Apache Kafka.

Needs `pip install kcoord[spark]` and Java 17. docs/pipeline.md explains tables and options.
"""
