# SPDX-License-Identifier: Apache-2.0
"""The Unix socket on which a worker serves the other workers.

Their requests go to the same handlers as those of clients. At the controller, workers also follow the metadata log
here. `kcoord.server.workers.peer_frames` describes the frames.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from functools import partial
from typing import Final, cast

from kcoord.config.kip1327 import Kip1327Form
from kcoord.server.api.api_table import Api, BoundApi, Client, RequestContext
from kcoord.server.broker import Broker
from kcoord.server.shards.metadata_service import Follower
from kcoord.server.workers.controller_metadata import MetadataFollowers
from kcoord.server.workers.peer_frames import (
    MAX_FRAME_BYTES,
    FrameKind,
    PeerRequest,
    decode_follower,
    decode_offset,
    decode_time,
    encode_response,
    kind_of,
)
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.framing import FrameReader
from kcoord_protocol.messages import Message

_logger = logging.getLogger(__name__)

PEER_APIS: Final = {
    ApiKey.CREATE_TOPICS: range(2, 8),
    ApiKey.DELETE_TOPICS: range(1, 7),
    ApiKey.ADD_PARTITIONS_TO_TXN: range(4, 6),
    ApiKey.WRITE_TXN_MARKERS: range(1, 3),
    ApiKey.LIST_TRANSACTIONS: range(1, 2),
    ApiKey.CREATE_ACLS: range(1, 4),
    ApiKey.DELETE_ACLS: range(1, 4),
    ApiKey.ALTER_CONFIGS: range(0, 3),
    ApiKey.CREATE_PARTITIONS: range(0, 4),
    ApiKey.CREATE_DELEGATION_TOKEN: range(1, 4),
    ApiKey.RENEW_DELEGATION_TOKEN: range(1, 3),
    ApiKey.EXPIRE_DELEGATION_TOKEN: range(1, 3),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: range(0, 2),
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: range(0, 2),
    ApiKey.ELECT_LEADERS: range(0, 3),
    ApiKey.ALTER_CLIENT_QUOTAS: range(0, 2),
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: range(0, 1),
    ApiKey.UPDATE_FEATURES: range(0, 3),
    ApiKey.UNREGISTER_BROKER: range(0, 1),
    ApiKey.ALLOCATE_PRODUCER_IDS: range(0, 1),
    ApiKey.BROKER_HEARTBEAT: range(0, 1),
}
"""The APIs and versions that workers may ask each other for.

AllocateProducerIds and BrokerHeartbeat are not open to clients. `kcoord workers` sends BrokerHeartbeat.
"""


class PeerListener:
    """The listening socket of one worker. `followers` is None in all workers but the controller."""

    def __init__(self, listening: socket.socket, broker: Broker, followers: MetadataFollowers | None) -> None:
        self._listening = listening
        self._server: asyncio.Server | None = None
        self._bound: dict[tuple[int, int], BoundApi] = {}
        self.connections: set[_PeerServerConnection] = set()
        self.broker = broker
        self.followers = followers
        self.in_flight = 0

    async def start(self) -> None:
        """Accepts connections from now on. Workers that connected earlier have waited in the accept queue."""
        self._server = await asyncio.get_running_loop().create_unix_server(
            lambda: _PeerServerConnection(self), sock=self._listening
        )

    def bound(self, api_key: int, version: int) -> BoundApi:
        """Returns the API that serves a request of another worker."""
        bound = self._bound.get((api_key, version))
        if bound is None:
            key = ApiKey(api_key)
            assert version in PEER_APIS[key], f"workers do not ask for {key.name} v{version}"
            bound = self._bound[api_key, version] = BoundApi(Api(key, PEER_APIS[key]), version)
        return bound

    def stop_accepting(self) -> None:
        """Accepts no further connection. Open connections are still served."""
        if self._server is not None:
            self._server.close()

    def close(self) -> None:
        for connection in list(self.connections):
            connection.close()


class _PeerServerConnection(asyncio.Protocol):
    def __init__(self, owner: PeerListener) -> None:
        self._owner = owner
        self._reader = FrameReader(MAX_FRAME_BYTES)
        self._transport: asyncio.Transport | None = None
        self._follower: Follower | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._owner.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._owner.connections.discard(self)
        if self._follower is not None and self._owner.followers is not None:
            self._owner.followers.remove(self._follower)

    def data_received(self, data: bytes) -> None:
        for frame in self._reader.feed(data):
            kind = kind_of(frame)
            if kind is FrameKind.REQUEST:
                self._serve(PeerRequest.decode(frame))
            else:
                self._follow(kind, *decode_offset(frame))

    def _follow(self, kind: FrameKind, offset: int, data: bytes) -> None:
        followers = self._owner.followers
        assert followers is not None, "only the controller has followers"
        if kind is FrameKind.FOLLOW:
            broker_id, process_id, newest_ms = decode_follower(data)
            self._follower = followers.add(broker_id, offset, self._write, newest_ms, process_id=process_id)
        elif self._follower is None:
            return
        elif (held_ms := decode_time(data)) is not None:
            followers.held(self._follower, offset, held_ms)
        else:
            followers.applied(self._follower, offset)

    def _serve(self, peer_request: PeerRequest) -> None:
        broker = self._owner.broker
        correlation_id = peer_request.correlation_id
        bound = self._owner.bound(peer_request.api_key, peer_request.version)
        request, _ = bound.decode_prefix(peer_request.body, 0, peer_request.version)
        host, principal = peer_request.client_host.removeprefix("/"), peer_request.principal
        client = Client(Kip1327Form.OFF, "", host, principal=principal)
        context = RequestContext(
            bound.key, bound.version, correlation_id, peer_request.client_id, client, broker.now_ms(), rights=None
        )
        self._owner.in_flight += 1
        # The worker that serves the client notes all other changes. Only `kcoord workers` fences brokers. It asks here.
        audit = broker.audit if bound.key is ApiKey.BROKER_HEARTBEAT else None
        change = audit.change_of(context, request) if audit is not None else None
        response = bound.respond(broker, context, request)
        if audit is not None:
            audit.answered(context, change, response)
        if asyncio.isfuture(response):
            response.add_done_callback(partial(self._settled, bound, correlation_id, request))
        else:
            self._answer(correlation_id, bound, response)

    def _settled(self, bound: BoundApi, correlation_id: int, request: Message, future: asyncio.Future[object]) -> None:
        self._answer(correlation_id, bound, bound.response_of(future, request))

    def _answer(self, correlation_id: int, bound: BoundApi, response: object) -> None:
        self._owner.in_flight -= 1
        self._write(encode_response(correlation_id, cast("Message", response).encode(bound.version)))

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()
