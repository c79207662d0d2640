# SPDX-License-Identifier: Apache-2.0
"""Real clients: librdkafka, kafka-python, aiokafka, the Java client, Kafka's command-line tools."""
