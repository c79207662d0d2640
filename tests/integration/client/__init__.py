# SPDX-License-Identifier: Apache-2.0
"""kcoord.client against real brokers: kcoord itself and, in tests that are marked `java`, Apache Kafka 4.3.1."""
