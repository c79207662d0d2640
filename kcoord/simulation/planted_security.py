# SPDX-License-Identifier: Apache-2.0
"""Planted faults in the rights and quotas of clients; `planted` lists them with all others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, Final

from kcoord.coordinator.group.regex import ResolvedRegexes, ResolveRegex, resolve
from kcoord.metadata.image import QuotaEntity
from kcoord.security.authorizer import Authorizer
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.api.handlers import metadata, offset_commit
from kcoord.server.broker import Broker
from kcoord.server.client_quotas import RateQuota
from kcoord.server.fast.fast_path import FastResponse
from kcoord.server.fast.guarded import GuardedFastPath
from kcoord.server.fast.metadata import MetadataFastPath
from kcoord.server.net.request_path import RequestPath
from kcoord.server.replies import Reply
from kcoord.server.shards import group_service
from kcoord.server.shards.metadata_service import LocalMetadataService
from kcoord.server.workers.controller_metadata import ControllerMetadataService
from kcoord_protocol.acls import Acl, AclOperation, ResourceType
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import CreateAclsRequest, DeleteAclsRequest, OffsetCommitRequest, OffsetCommitResponse


def _outlives_its_acls(self: GuardedFastPath, frame: bytes, now_ms: int) -> FastResponse:
    """Answers by what was learned before the ACLs changed."""
    if self._authorizer is not None:
        return self._path.respond(frame, now_ms)
    return _guarded_respond(self, frame, now_ms)


def _answers_for_everyone(self: MetadataFastPath, frame: bytes, now_ms: int) -> bytes | None:
    """Repeats responses that were made for clients with other rights."""
    self._owner = b""
    return _metadata_fast_respond(self, frame, now_ms)


def _waits_for_no_worker(self: ControllerMetadataService, operation: Any, request: Any, context: Any) -> Any:
    """Acknowledges changes of ACLs before the workers have applied them."""
    if isinstance(request, CreateAclsRequest | DeleteAclsRequest):
        return LocalMetadataService._run(self, operation, request, context)
    return _run(self, operation, request, context)


def _keeps_decisions(self: Authorizer, acls: Mapping[bytes, Acl]) -> Authorizer:
    """Keeps the cached decisions when the ACLs change."""
    changed = _with_acls(self, acls)
    changed._decisions = self._decisions
    return changed


def _matches_hidden_topics(work: ResolveRegex, topic_names: Iterable[str]) -> ResolvedRegexes:
    """Resolves regular expressions to topics that the member may not describe."""
    return resolve(replace(work, describable=None), topic_names)


def _commits_nevertheless(
    broker: Broker, context: RequestContext, request: OffsetCommitRequest
) -> Reply[OffsetCommitResponse]:
    """Writes the offsets of a commit that it denies."""
    try:
        return _commit(broker, context, request)
    except KafkaError:
        allowed = copy(context)
        allowed.rights = None
        _commit(broker, allowed, request)
        raise


def _hides_nothing(*arguments: object) -> frozenset[str]:
    """Shows all topics to every client."""
    return frozenset()


def _ignores_denials(self: Rights, operations: Iterable[AclOperation], resource_type: ResourceType, name: str) -> int:
    """Shows all operations on a resource as authorized."""
    return sum(1 << operation for operation in operations)


def _forgets_rates(self: RateQuota, quotas: Mapping[QuotaEntity, Mapping[str, float]]) -> None:
    """Forgets the rates of clients, and so whom it throttles, when a quota changes."""
    _change_limits(self, quotas)
    self._meters.clear()


def _mutes_nobody(self: RequestPath, throttle_ms: int) -> None:
    """Reads further requests of throttled clients at once."""


_change_limits = RateQuota.change_limits
_guarded_respond = GuardedFastPath.respond
_metadata_fast_respond = MetadataFastPath.respond
_run = ControllerMetadataService._run
_with_acls = Authorizer.with_acls
_commit = offset_commit.handle

PATCHES: Final[Mapping[str, Sequence[tuple[object, str, object]]]] = {
    "acls-answered-before-workers-know": [(ControllerMetadataService, "_run", _waits_for_no_worker)],
    "decisions-outlive-their-acls": [(Authorizer, "with_acls", _keeps_decisions)],
    "denied-commit-is-written": [(offset_commit, "handle", _commits_nevertheless)],
    "fast-path-outlives-its-acls": [(GuardedFastPath, "respond", _outlives_its_acls)],
    "hidden-topics-are-listed": [(metadata, "_hidden_names", _hides_nothing)],
    "metadata-of-another-principal": [(MetadataFastPath, "respond", _answers_for_everyone)],
    "operations-without-rights": [(Rights, "operations", _ignores_denials)],
    "rates-forgotten-by-a-change": [(RateQuota, "change_limits", _forgets_rates)],
    "regex-matches-hidden-topics": [(group_service, "resolve", _matches_hidden_topics)],
    "throttled-client-is-served": [(RequestPath, "_throttle", _mutes_nobody)],
}
"""The replacements of each fault, as in `planted.Fault`."""
