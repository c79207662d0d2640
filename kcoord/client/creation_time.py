# SPDX-License-Identifier: Apache-2.0
"""Reads a group's creation time from a response (KIP-1327): it is a field in v2 and a tagged field in v1. Pure."""

from __future__ import annotations

from struct import Struct
from typing import Final

from kcoord_protocol.messages import ConsumerGroupDescribeResponse, ConsumerGroupHeartbeatResponse

UNKNOWN_TIME_MS: Final = -1

_CREATION_TIME_TAG: Final = 11_000
"""The tag of GroupCreationTimeMs, which kcoord brokers add to v1 of heartbeat and describe responses."""
_INT64: Final = Struct(">q")


def group_creation_time_ms(
    message: ConsumerGroupHeartbeatResponse | ConsumerGroupDescribeResponse.DescribedGroup,
) -> int:
    """Returns the time at which the group was created, -1 if the response does not have it."""
    if message.group_creation_time_ms != UNKNOWN_TIME_MS:
        return message.group_creation_time_ms
    data = dict(message.unknown_tagged_fields).get(_CREATION_TIME_TAG, b"")
    return int(_INT64.unpack(data)[0]) if len(data) == _INT64.size else UNKNOWN_TIME_MS
