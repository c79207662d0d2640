# SPDX-License-Identifier: Apache-2.0
"""The rights of kcoord's user in the upstream, from the table in docs/guides/gateway.md, and their use by a client."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

from kcoord.client import AdminClient, ConsumerGroupMetadata, OffsetAndMetadata, Producer, TopicPartition
from kcoord.client.config import AdminConfig, ProducerConfig
from kcoord.testing import allow
from kcoord_protocol.acls import Acl
from tests.support.shared import ROOT

TOPIC: Final = "orders"
GROUP: Final = "alice-pays"
CLIENT_ID: Final = "alice-transactions"
"""A transactional id of clients that commit offsets in transactions."""
PAGE: Final = ROOT / "docs" / "guides" / "gateway.md"
_ROW: Final = re.compile(
    r"^\| (\w+) \| (topics?|group|transactional ids|cluster)(?: with the prefix| of clients[\w ]*)?(?: `(.+?)`)? \|",
    re.M,
)


class Right(NamedTuple):
    """A row of the table."""

    operation: str
    kind: str
    name: str

    @property
    def is_for_clients(self) -> bool:
        """Whether kcoord needs the right for what clients ask for, and not for its start."""
        return self.name == "*" or (self.kind == "transactional ids" and not self.name)

    def acl(self, user: str) -> Acl:
        """Returns the ACL that gives the right."""
        match self.kind:
            case "topics":
                return allow(user, self.operation, topic=self.name, prefixed=True)
            case "topic":
                return allow(user, self.operation, topic=self.name)
            case "group":
                return allow(user, self.operation, group=self.name)
            case "transactional ids" if not self.name:
                return allow(user, self.operation, transactional_id=CLIENT_ID)
            case "transactional ids":
                return allow(user, self.operation, transactional_id=self.name, prefixed=True)
        return allow(user, self.operation, cluster=True)

    def __str__(self) -> str:
        return f"{self.operation} on {self.kind} {self.name}".rstrip()


RIGHTS: Final = [Right(*row) for row in _ROW.findall(PAGE.read_text())]
assert len(RIGHTS) == 10, RIGHTS


async def use(properties: Mapping[str, str], group_id: str = GROUP) -> None:
    """Asks for a topic and for offsets of a new group, and commits some in a transaction. Raises KafkaError."""
    async with AdminClient(AdminConfig.from_properties(properties)) as admin:
        await admin.describe_topics([TOPIC])
        (await admin.list_consumer_group_offsets([group_id])).all()
    transactional = {**properties, "transactional.id": CLIENT_ID, "max.block.ms": "2000"}
    async with Producer(ProducerConfig.from_properties(transactional)) as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        offsets = {TopicPartition(TOPIC, 0): OffsetAndMetadata(8)}
        await producer.send_offsets_to_transaction(offsets, ConsumerGroupMetadata(group_id))
        await producer.commit_transaction()
