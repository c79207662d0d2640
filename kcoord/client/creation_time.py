# SPDX-License-Identifier: Apache-2.0
"""A group's creation time in the responses that carry it (KIP-1327): a field of v2, a tagged field of v1. Pure."""

from __future__ import annotations

from struct import Struct
from typing import Final

from kcoord_protocol.messages import ConsumerGroupDescribeResponse, ConsumerGroupHeartbeatResponse

UNKNOWN_TIME_MS: Final = -1

_CREATION_TIME_TAG: Final = 11_000
"""GroupCreationTimeMs of a kcoord broker in heartbeat and describe v1."""
_INT64: Final = Struct(">q")


def group_creation_time_ms(
    message: ConsumerGroupHeartbeatResponse | ConsumerGroupDescribeResponse.DescribedGroup,
) -> int:
    """When the group was created; -1 if the broker does not tell."""
    if message.group_creation_time_ms != UNKNOWN_TIME_MS:
        return message.group_creation_time_ms
    data = dict(message.unknown_tagged_fields).get(_CREATION_TIME_TAG, b"")
    return int(_INT64.unpack(data)[0]) if len(data) == _INT64.size else UNKNOWN_TIME_MS
