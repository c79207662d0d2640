# SPDX-License-Identifier: Apache-2.0
"""Bit fields of the operations that a client may do with a resource: all of them, while there is no authorizer.

Bit n stands for the ACL operation of code n.
"""

from __future__ import annotations

from typing import Final

NOT_ASKED: Final = -(2**31)
NO_AUTHORIZER: Final = "No Authorizer is configured."
"""Kafka's text for those who create or delete ACLs."""

_READ, _WRITE, _CREATE, _DELETE, _ALTER, _DESCRIBE, _CLUSTER_ACTION = (1 << code for code in range(3, 10))
_DESCRIBE_CONFIGS, _ALTER_CONFIGS, _IDEMPOTENT_WRITE = (1 << code for code in range(10, 13))

TOPIC_OPERATIONS: Final = _READ | _WRITE | _CREATE | _DELETE | _ALTER | _DESCRIBE | _DESCRIBE_CONFIGS | _ALTER_CONFIGS
CLUSTER_OPERATIONS: Final = (
    _CREATE | _ALTER | _DESCRIBE | _CLUSTER_ACTION | _DESCRIBE_CONFIGS | _ALTER_CONFIGS | _IDEMPOTENT_WRITE
)
