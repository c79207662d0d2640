# SPDX-License-Identifier: Apache-2.0
"""Which requests the audit log has, by its events, and the errors of requests that are answered later."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any

import pytest

from kcoord.config import BrokerConfig
from kcoord.security.authorizer import Authorizer
from kcoord.server.api.api_table import Client, RequestContext
from kcoord.server.observe.audit_log import AuditLog
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    AlterClientQuotasRequest,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    ListGroupsRequest,
    OffsetCommitRequest,
)

REQUESTS: dict[str, tuple[ApiKey, Message]] = {
    "change": (ApiKey.DELETE_GROUPS, DeleteGroupsRequest(groups_names=["g"])),
    "commit": (ApiKey.OFFSET_COMMIT, OffsetCommitRequest(group_id="g", generation_id_or_member_epoch=-1)),
    "member": (ApiKey.OFFSET_COMMIT, OffsetCommitRequest(group_id="g", generation_id_or_member_epoch=3)),
    "list": (ApiKey.LIST_GROUPS, ListGroupsRequest()),
}
ALL = "changes,commits,denials,logins"


class Log:
    """An audit log with the given events, and a client that may do nothing."""

    def __init__(self, folder: Path, events: str = ALL) -> None:
        self._path = folder / "audit.log"
        settings = {"kcoord.audit.log": str(self._path), "kcoord.audit.events": events}
        self.audit = AuditLog(BrokerConfig.from_properties(settings), lambda _: None)
        form = BrokerConfig.from_properties({}).kip1327_form("")
        self.client = Client(form, "L", "192.0.2.1", 4711, "User:eve")

    def context(self, key: ApiKey) -> RequestContext:
        rights = self.client.rights(Authorizer({}), key, is_audited=True)
        return RequestContext(key, 1, 7, "c", self.client, 0, rights=rights)

    def ask(self, kind: str, response: object, *, is_denied: bool = False) -> None:
        key, request = REQUESTS[kind]
        context = self.context(key)
        change = self.audit.change_of(context, request)
        if is_denied and context.rights is not None:
            context.rights.allows(AclOperation.READ, ResourceType.GROUP, "g")
        self.audit.answered(context, change, response)

    def entries(self) -> list[dict[str, Any]]:
        self.audit.file.close()
        return [json.loads(line) for line in self._path.read_text().splitlines()]


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (ALL, ["change", "change", "commit", "commit", "denied", "denied", "login"]),
        ("changes", ["change", "change"]),
        ("commits", ["commit", "commit"]),
        ("denials", ["change", "commit", "denied", "denied"]),
        ("logins", ["login"]),
    ],
)
def test_the_events_select_the_entries(tmp_path: Path, events: str, expected: list[str]) -> None:
    log = Log(tmp_path, events)
    for kind in REQUESTS:
        for is_denied in (False, True):
            log.ask(kind, DeleteGroupsResponse(), is_denied=is_denied)
    log.audit.login(log.client, "L", 0, "PLAIN", None)
    assert sorted(entry["event"] for entry in log.entries()) == expected
    assert log.audit.has_commits == ("commits" in events)


def test_an_access_that_only_filters_is_no_denial(tmp_path: Path) -> None:
    log = Log(tmp_path)
    context = log.context(ApiKey.LIST_GROUPS)
    assert context.rights is not None
    context.rights.allows(AclOperation.DESCRIBE, ResourceType.GROUP, "g", logs_denial=False)
    log.audit.answered(context, None, None)
    assert log.entries() == []


async def test_the_result_of_a_request_that_waits_is_noted(tmp_path: Path) -> None:
    log = Log(tmp_path)
    result = DeleteGroupsResponse.DeletableGroupResult(group_id="g", error_code=Errors.NON_EMPTY_GROUP)
    futures = [asyncio.get_running_loop().create_future() for _ in range(4)]
    for future in futures:
        log.ask("change", future)
    futures[0].set_result(DeleteGroupsResponse(results=[result]))
    futures[1].set_exception(KafkaError(Errors.NOT_COORDINATOR))
    futures[2].set_exception(ValueError())
    futures[3].cancel()
    await asyncio.sleep(0)
    assert [entry["errors"] for entry in log.entries()] == [
        [{"groupId": "g", "error": "NON_EMPTY_GROUP"}],
        [{"error": "NOT_COORDINATOR"}],
        [{"error": "UNKNOWN_SERVER_ERROR"}],
        [{"error": "UNKNOWN"}],
    ]


def test_long_names_do_not_make_an_entry_long(tmp_path: Path) -> None:
    """A client without any right could otherwise rotate away the entries before."""
    log = Log(tmp_path)
    names = ["short", *[f"{number}{'x' * 30_000}" for number in range(150)]]
    context = log.context(ApiKey.DELETE_GROUPS)
    assert context.rights is not None
    context.rights.allowed(AclOperation.DELETE, ResourceType.GROUP, names)
    results = [
        DeleteGroupsResponse.DeletableGroupResult(group_id=name, error_code=Errors.GROUP_AUTHORIZATION_FAILED)
        for name in names
    ]
    change = log.audit.change_of(context, DeleteGroupsRequest(groups_names=names))
    log.audit.answered(context, change, DeleteGroupsResponse(results=results))
    (entry,) = log.entries()
    assert entry["fields"]["groupsNames"][:2] == ["short", f"0{'x' * 1023}... (30001 characters)"]
    assert len(entry["errors"]) == 151
    assert len(json.dumps(entry)) < 400_000


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_every_entry_is_json(tmp_path: Path, value: float) -> None:
    log = Log(tmp_path)
    context = log.context(ApiKey.ALTER_CLIENT_QUOTAS)
    quota = AlterClientQuotasRequest.EntryData(
        entity=[], ops=[AlterClientQuotasRequest.OpData(key="producer_byte_rate", value=value)]
    )
    log.audit.answered(context, log.audit.change_of(context, AlterClientQuotasRequest(entries=[quota])), None)
    (entry,) = log.entries()
    assert entry["fields"]["entries"][0]["ops"][0]["value"] == str(value)
