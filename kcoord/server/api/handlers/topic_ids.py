# SPDX-License-Identifier: Apache-2.0
"""Fresh ids for topics that may be created; their text form never begins with '-'."""

from __future__ import annotations

from kcoord.server.api.request_context import candidate_id
from kcoord_protocol.uuid import uuid_from_string


def random_topic_ids(count: int) -> list[bytes]:
    return [uuid_from_string(candidate_id()) for _ in range(count)]
