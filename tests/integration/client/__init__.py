# SPDX-License-Identifier: Apache-2.0
"""kcoord.client against real brokers: kcoord itself, and Apache Kafka 4.3.1 where the tests are marked `java`."""
