# SPDX-License-Identifier: Apache-2.0
"""Apache Kafka's recorded answers as the judge."""
