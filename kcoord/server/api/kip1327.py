# SPDX-License-Identifier: Apache-2.0
"""KIP-1327 for versions that have no field for it: a group's creation time as a tagged field, which readers that do not
know it skip.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Final

from kcoord.config.kip1327 import Kip1327Form

if TYPE_CHECKING:
    from kcoord.server.api.request_context import RequestContext
    from kcoord_protocol.message import TaggedFields

CREATION_TIME_TAG: Final = 11_000
"""GroupCreationTimeMs (int64) in ConsumerGroupHeartbeatResponse and in DescribedGroup, both v1. Far above the tags that
Kafka counts from 0.
"""
TAGGED_VERSION: Final = 1

_INT64: Final = Struct(">q")


def has_creation_time_tag(context: RequestContext) -> bool:
    """Whether the response to a heartbeat or describe request carries the tagged field.

    Some decoders fail on tagged fields that they do not know. A client that does not begin with ApiVersions expects the
    bytes of Apache Kafka, whatever the broker is, so it gets no tagged field.
    """
    client = context.client
    return (
        context.api_version == TAGGED_VERSION
        and client is not None
        and client.begins_with_api_versions
        and client.form is Kip1327Form.CREATION_TIME
    )


def creation_time_tag(creation_time_ms: int) -> TaggedFields:
    """The tagged field; none if the creation time is unknown."""
    return ((CREATION_TIME_TAG, _INT64.pack(creation_time_ms)),) if creation_time_ms >= 0 else ()
