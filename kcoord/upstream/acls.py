# SPDX-License-Identifier: Apache-2.0
"""The ACLs of the upstream, which decide what clients may do with groups.

Theory of operation. If clients log in at the upstream, the upstream decides about the requests that are passed on.
Requests that are answered here are judged by the same ACLs: kcoord's own authorizer gets those that DescribeAcls
returns to kcoord's own principal.

The ACLs are read before the first client connects, which fails the start if they cannot be read, and then three times
within `kcoord.upstream.acls.max.age.ms`. A client that creates or deletes ACLs through kcoord gets its response when
they are read again. If the last ACLs that were read are older than the maximum, `check` fails each request about groups
with a retriable error until they are read again. The authorizer is replaced then, too, so that no fast path answers.

An upstream without an authorizer has no ACLs, and lets every client do everything. So does kcoord then, unless
`authorizer.class.name` demands an authorizer. If the upstream had an authorizer before, its absence counts as a
failure, because it may be that of a single broker.

`super.users` and `allow.everyone.if.no.acl.found` are no ACLs, and no request returns them. kcoord uses its own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Final

from kcoord.client.admin.acls import describe_acls
from kcoord.client.cluster import Cluster
from kcoord.config.principals import parse_super_users
from kcoord.security.authorizer import Authorizer
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.errors import StartError
from kcoord.upstream.rights import naming_right
from kcoord_protocol.acls import Acl, AclFilter
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import Message

START_SECONDS: Final = 15.0
READS_PER_AGE: Final = 3

_logger = logging.getLogger(__name__)


class UpstreamAcls:
    """Keeps the broker's authorizer like the ACLs of the upstream; the module describes when."""

    def __init__(self, broker: Broker, cluster: Cluster) -> None:
        config = broker.config
        self._broker = broker
        self._cluster = cluster
        self._max_age_seconds = config.kcoord_upstream_acls_max_age_ms / 1000
        self._demands_authorizer = bool(config.authorizer_class_name)
        self._new_authorizer = Authorizer(
            {},
            super_users=parse_super_users(config.super_users),
            allow_everyone=config.allow_everyone_if_no_acl_found,
            matches_cidr=config.is_kafka_4_4,
        ).with_acls
        self._acls: Mapping[bytes, Acl] | None = None
        """The ACLs that were read last by id; None if the upstream has had no authorizer so far."""
        self._read_at = 0.0
        """The time of the event loop at which the last successful read began."""
        self._reading: asyncio.Task[None] | None = None
        self._is_closed = True
        broker.authorizer = Authorizer({})

    async def start(self) -> None:
        """Reads the ACLs. Raises StartError if they cannot be read."""
        try:
            await self._read(START_SECONDS)
        except KafkaError as error:
            raise StartError(f"the ACLs of the upstream cannot be read: {_explained(error)}") from None
        if self._acls is None:
            _logger.warning(
                "The upstream has no authorizer, so every client that logs in may use every group. Set "
                "authorizer.class.name to refuse such an upstream"
            )

    async def keep(self) -> None:
        """Reads the ACLs again and again, and closes the groups while they are too old."""
        pause = self._max_age_seconds / READS_PER_AGE
        while True:
            await asyncio.sleep(pause)
            await self.refresh()

    async def refresh(self) -> None:
        """Reads the ACLs. One read runs at a time, and begins after the call. Logs a failure."""
        if self._reading is not None:
            # It may have begun before the change that the caller knows of.
            await asyncio.wait([self._reading])
        if self._reading is None or self._reading.done():
            self._reading = self._broker.spawn(self._refresh())
        await asyncio.shield(self._reading)

    async def _refresh(self) -> None:
        try:
            await self._read(self._max_age_seconds / READS_PER_AGE)
        except KafkaError as error:
            age = asyncio.get_running_loop().time() - self._read_at
            if age <= self._max_age_seconds:
                _logger.warning("The ACLs of the upstream cannot be read: %s", _explained(error))
            elif not self._is_closed:
                self._is_closed = True
                self._broker.authorizer = Authorizer({})
                _logger.error(
                    "No group is served: the ACLs of the upstream could not be read for %d s: %s",
                    age,
                    _explained(error),
                )

    async def _read(self, seconds: float) -> None:
        """Makes the authorizer like the ACLs are now. Raises KafkaError."""
        cluster, began = self._cluster, asyncio.get_running_loop().time()
        acls: Sequence[Acl] | None = None
        try:
            acls = await cluster.retry(
                "DescribeAcls", cluster.deadline(seconds * 1000), lambda: describe_acls(cluster, AclFilter())
            )
        except KafkaError as error:
            if error.error is not Errors.SECURITY_DISABLED or self._demands_authorizer or self._acls is not None:
                raise
        self._read_at = began
        self._apply(acls)

    def _apply(self, acls: Sequence[Acl] | None) -> None:
        """Replaces the authorizer, if the ACLs have changed."""
        old = self._acls
        if acls is None:
            if self._is_closed:
                # Paths of clients guard their fast paths only if there is an authorizer.
                self._broker.authorizer = Authorizer({}, allow_everyone=True)
        else:
            by_id = {_id_of(acl): acl for acl in acls}
            # The authorizer compares ACLs by identity.
            self._acls = by_id if old is None else {id_: old.get(id_, acl) for id_, acl in by_id.items()}
            if self._is_closed or old is None or self._acls.keys() != old.keys():
                self._broker.authorizer = self._new_authorizer(self._acls)
        if self._is_closed and old is not None:
            _logger.info("Groups are served again: the ACLs of the upstream could be read")
        self._is_closed = False

    def check(self, broker: Broker, context: RequestContext, request: Message) -> None:
        """Raises COORDINATOR_NOT_AVAILABLE while the ACLs are too old to decide about groups."""
        if asyncio.get_running_loop().time() - self._read_at > self._max_age_seconds:
            raise KafkaError(Errors.COORDINATOR_NOT_AVAILABLE, "The ACLs of the cluster cannot be read.")


def _id_of(acl: Acl) -> bytes:
    return blake2b(repr(acl).encode("utf-8", "surrogatepass"), digest_size=16).digest()


def _explained(error: KafkaError) -> str:
    """Returns the text of an error, with the missing right if that is the reason."""
    if error.error is Errors.SECURITY_DISABLED:
        return "the upstream has no authorizer, but authorizer.class.name demands one"
    return str(naming_right(error, "Describe", "the cluster"))
