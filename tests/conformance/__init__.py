# SPDX-License-Identifier: Apache-2.0
"""Tests that compare kcoord with Apache Kafka: its recorded responses, its own tests, and a running broker."""
