# SPDX-License-Identifier: Apache-2.0
"""The rights of kcoord's user in the upstream, from the table in docs/guides/gateway.md."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

from kcoord.testing import allow
from kcoord_protocol.acls import Acl
from tests.support.shared import ROOT

PAGE: Final = ROOT / "docs" / "guides" / "gateway.md"
_ROW: Final = re.compile(
    r"^\| (\w+) \| (topics?|group|transactional ids|cluster)(?: with the prefix)?(?: `(.+?)`)? \|", re.M
)


class Right(NamedTuple):
    """A row of the table."""

    operation: str
    kind: str
    name: str

    def acl(self, user: str) -> Acl:
        """Returns the ACL that gives the right."""
        match self.kind:
            case "topics":
                return allow(user, self.operation, topic=self.name, prefixed=True)
            case "topic":
                return allow(user, self.operation, topic=self.name)
            case "group":
                return allow(user, self.operation, group=self.name)
            case "transactional ids":
                return allow(user, self.operation, transactional_id=self.name, prefixed=True)
        return allow(user, self.operation, cluster=True)

    def __str__(self) -> str:
        return f"{self.operation} on {self.kind} {self.name}".rstrip()


RIGHTS: Final = [Right(*row) for row in _ROW.findall(PAGE.read_text())]
assert len(RIGHTS) == 9, RIGHTS
