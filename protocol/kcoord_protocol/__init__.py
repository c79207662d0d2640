# SPDX-License-Identifier: Apache-2.0
"""Kafka's wire protocol: bytes to typed messages and back.

Stateless, no I/O but reading its own schema files, and no dependency on the broker. The message classes are in
`kcoord_protocol.messages`.
"""
