# SPDX-License-Identifier: Apache-2.0
"""Errors about rights that kcoord's user lacks in the upstream. `docs/guides/gateway.md` has the table of rights."""

from __future__ import annotations

from typing import Final

from kcoord_protocol.errors import Errors, KafkaError

_REFUSALS: Final = frozenset(
    {
        Errors.CLUSTER_AUTHORIZATION_FAILED,
        Errors.GROUP_AUTHORIZATION_FAILED,
        Errors.TOPIC_AUTHORIZATION_FAILED,
        Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    }
)


def naming_right(error: KafkaError, operation: str, resource: str) -> KafkaError:
    """Returns the error; if a missing right is its reason, the error names the right."""
    if error.error not in _REFUSALS:
        return error
    return KafkaError(error.error, f"kcoord's user in the upstream lacks the right {operation} on {resource}")
