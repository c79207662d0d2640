# SPDX-License-Identifier: Apache-2.0
"""The audit log: who did what, from where, allowed or denied by which rule, and with which result.

`kcoord.audit.log` names the file. Each entry is one JSON object in one line (`kcoord.server.observe.audit_file`). There
are these events, of which `kcoord.audit.events` selects:

* `change`: a request of an administrator that changes something (`audited_requests`), with its fields and errors.
* `commit`: an OffsetCommit or TxnOffsetCommit of a client that is no member of the group, such as a reset.
* `denied`: any other request of which an ACL, or the absence of one, denies a part.
* `login`: an authentication with SASL that succeeded or failed.

Heartbeats and commits of members are in the log only if they are denied. A change or commit that is denied is in the
log if changes, commits or denials are selected.

The request path calls `change_of` before the handler, since handlers change their requests, and `answered` after it.
With several workers each has a file of its own, and the worker that serves the client has the entry. Requests that
workers pass on to each other make no second entry.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Final

from kcoord.server.api.authorization import request_name
from kcoord.server.observe.audit_file import AuditEntry, AuditFile
from kcoord.server.observe.audited_requests import (
    MOST_PARTS,
    TopicName,
    errors_of,
    fields_of,
    is_change,
    is_commit_without_member,
)
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.message import Message

if TYPE_CHECKING:
    from kcoord.config import BrokerConfig
    from kcoord.server.api.api_table import Client, RequestContext

CHANGES: Final = "changes"
COMMITS: Final = "commits"
DENIALS: Final = "denials"
LOGINS: Final = "logins"
MOST_CHARACTERS: Final = 1 << 18
"""An entry has no more characters in its texts. Clients choose the lengths of names, also those without any right."""
_LONGEST_TEXT: Final = 1024


class AuditLog:
    """Makes the entries of one broker. All methods run in the event loop, and none blocks."""

    def __init__(self, config: BrokerConfig, topic_name: TopicName) -> None:
        """Raises StartError if the file cannot be used."""
        self.file = AuditFile(
            config.kcoord_audit_log, config.kcoord_audit_log_max_bytes, config.kcoord_audit_log_max_files
        )
        self._events = frozenset(config.kcoord_audit_events)
        self._broker_id = config.node_id
        self._topic_name = topic_name
        self.has_commits = COMMITS in self._events
        """True if each commit of a client that is no member needs an entry."""

    def change_of(self, context: RequestContext, request: Message) -> AuditEntry | None:
        """Returns the beginning of an entry for a request that changes something; None for another request."""
        if is_change(context.api_key, request):
            event = "change"
        elif is_commit_without_member(request):
            event = "commit"
        else:
            return None
        return {"event": event, "fields": fields_of(context.api_key, request, self._topic_name)}

    def answered(self, context: RequestContext, change: AuditEntry | None, response: object) -> None:
        """Notes a request when its response is known. `response` is that of the handler, or its future."""
        if not asyncio.isfuture(response):
            self._note(context, change, response)
        elif change is not None or context.rights is not None:
            response.add_done_callback(partial(self._settled, context, change))

    def _settled(self, context: RequestContext, change: AuditEntry | None, future: asyncio.Future[object]) -> None:
        if future.cancelled():
            # The client is gone, or the broker stops. Nobody knows whether the change took effect.
            self._note(context, change, None, "UNKNOWN")
        elif (failure := future.exception()) is not None:
            error = failure.error if isinstance(failure, KafkaError) else Errors.UNKNOWN_SERVER_ERROR
            self._note(context, change, None, error.name)
        else:
            self._note(context, change, future.result())

    def _note(
        self, context: RequestContext, change: AuditEntry | None, response: object, error: str | None = None
    ) -> None:
        """Queues the entry, if it is selected. `error` is set if there is no response."""
        rights = context.rights
        is_denied = rights is not None and rights.is_denied
        selected = is_denied and DENIALS in self._events
        if change is not None:
            selected = selected or f"{change['event']}s" in self._events
        if not selected:
            return
        entry: dict[str, object] = {
            **self._start(context.now_ms, "denied" if change is None else str(change["event"])),
            "allowed": not is_denied,
            "principal": context.client.principal or None,
            "host": context.client.client_host.removeprefix("/"),
            "clientId": context.client_id,
            "listener": context.client.listener_name,
            "request": request_name(context.api_key),
            "version": context.api_version,
        }
        if rights is not None:
            entry["decisions"] = rights.decisions(MOST_PARTS, denials_only=change is None)
        if change is not None:
            entry["fields"] = change["fields"]
            entry["errors"] = errors_of(response) if isinstance(response, Message) else []
            if error is not None:
                entry["errors"] = [{"error": error}]
        self.file.add(_Bounded().entry(entry))

    def login(self, client: Client, listener_name: str, now_ms: int, mechanism: str, failure: str | None) -> None:
        """Notes the end of an authentication. `failure` is why it failed; None if it succeeded."""
        if LOGINS not in self._events:
            return
        entry: dict[str, object] = {
            **self._start(now_ms, "login"),
            "allowed": failure is None,
            "principal": client.principal if failure is None else None,
            "host": client.remote_host,
            "listener": listener_name,
            "mechanism": mechanism,
        }
        if failure is not None:
            entry["reason"] = failure
        self.file.add(entry)

    def _start(self, now_ms: int, event: str) -> Mapping[str, object]:
        time = datetime.fromtimestamp(now_ms / 1000, UTC).isoformat(timespec="milliseconds")
        return {"time": time.replace("+00:00", "Z"), "event": event, "broker": self._broker_id}


class _Bounded:
    """Makes values that JSON has, of a bounded size, out of the values of one entry."""

    def __init__(self) -> None:
        self._left = MOST_CHARACTERS

    def entry(self, entry: AuditEntry) -> AuditEntry:
        """Returns the entry with texts of at most _LONGEST_TEXT, and together of at most MOST_CHARACTERS."""
        return {name: self._value(value) for name, value in entry.items()}

    def _value(self, value: object) -> object:
        if isinstance(value, str):
            shown = value[: min(_LONGEST_TEXT, self._left)]
            self._left -= len(shown)
            return value if len(shown) == len(value) else f"{shown}... ({len(value)} characters)"
        if isinstance(value, Mapping):
            return self.entry(value)
        if isinstance(value, list):
            return [self._value(part) for part in value]
        return str(value) if isinstance(value, float) and not math.isfinite(value) else value
