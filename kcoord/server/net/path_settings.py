# SPDX-License-Identifier: Apache-2.0
"""What the request paths of one listener have in common: their settings, and which fast paths each of them has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kcoord.server.api.api_table import ANONYMOUS, ApiTable, Client
from kcoord.server.fast.fast_path import FastPath
from kcoord.server.fast.guarded import GuardedFastPath
from kcoord.server.fast.heartbeat import HeartbeatFastPath
from kcoord.server.fast.metadata import MetadataFastPath, MetadataResponses
from kcoord.server.fast.offset_commit import OffsetCommitFastPath
from kcoord.server.fast.offset_fetch import OffsetFetchFastPath

if TYPE_CHECKING:
    from kcoord.security.login_states import LoginStates
    from kcoord.server.broker import Broker


@dataclass(slots=True)
class PathSettings:
    """The settings that all request paths of one listener share."""

    broker: Broker
    listener_name: str
    max_frame_bytes: int
    max_request_bytes: int
    """The largest frame of an API that carries no records."""
    has_fast_paths: bool
    metadata_responses: MetadataResponses | None
    """None if the handler makes every Metadata response."""
    principal: str = ANONYMOUS
    """The principal of a client that has not shown who it is."""
    new_login: Callable[[], LoginStates] | None = None
    """Makes the login of a connection. None if clients do not authenticate with SASL."""
    logins: Counter[str] = field(default_factory=Counter)
    """Numbers of authentications by the names of Kafka's metrics."""

    @classmethod
    def of(cls, broker: Broker, listener_name: str, new_login: Callable[[], LoginStates] | None = None) -> PathSettings:
        """Returns the settings that the configuration of the broker asks for."""
        config = broker.config
        return cls(
            broker,
            listener_name,
            config.socket_request_max_bytes,
            min(config.kcoord_request_max_bytes, config.socket_request_max_bytes),
            config.kcoord_fast_paths_enable,
            MetadataResponses() if config.kcoord_metadata_cache_enable else None,
            config.listener_principals.get(listener_name, ANONYMOUS),
            new_login,
        )

    def new_fast_paths(self, apis: ApiTable, client: Client, on_response: Callable[[], None]) -> dict[int, FastPath]:
        """Returns new fast paths for one client, by the low byte of their API keys."""
        broker, groups, responses = self.broker, self.broker.groups, self.metadata_responses
        new_paths: list[Callable[[], FastPath]] = []
        if self.has_fast_paths:
            topic_name, audit = broker.topics.topic_name, broker.audit
            members_only = audit is not None and audit.has_commits
            new_paths += (
                lambda: HeartbeatFastPath(groups),
                lambda: OffsetCommitFastPath(groups, apis, on_response, topic_name, members_only=members_only),
                lambda: OffsetFetchFastPath(groups, apis, on_response, topic_name),
            )
        if responses is not None:
            new_paths.append(lambda: MetadataFastPath(responses, broker, apis, client))
        fast_paths: dict[int, FastPath] = {}
        for new_path in new_paths:
            fast_path = new_path()
            guarded = fast_path if broker.authorizer is None else GuardedFastPath(new_path, broker, client)
            fast_paths.update(dict.fromkeys((key & 0xFF for key in fast_path.keys), guarded))
        return fast_paths
