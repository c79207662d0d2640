# SPDX-License-Identifier: Apache-2.0
"""ImportGroups: imports groups when an operator asks for it. An API of kcoord's own, for `kcoord upstream import`."""

from __future__ import annotations

import asyncio
from typing import Final, cast

from kcoord.coordinator.group.imports import ImportRequest
from kcoord.server.api.api_table import Api, ErrorFunction, RequestContext
from kcoord.server.broker import Broker
from kcoord.upstream.group_imports import GroupImports
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import ImportGroupsRequest, ImportGroupsResponse

MOST_GROUPS: Final = 1_000
"""A request for more groups is rejected, because each group costs several requests to the upstream."""


def import_groups_api(imports: GroupImports) -> Api:
    """Returns the API. A client needs the right Read on a group, as for a commit."""

    async def import_groups(
        broker: Broker, context: RequestContext, request: ImportGroupsRequest
    ) -> ImportGroupsResponse:
        steps = [_import(imports, context, request, group_id) for group_id in dict.fromkeys(request.groups)]
        return ImportGroupsResponse(results=await asyncio.gather(*steps))

    def handle(
        broker: Broker, context: RequestContext, request: ImportGroupsRequest
    ) -> asyncio.Task[ImportGroupsResponse]:
        if len(request.groups) > MOST_GROUPS:
            raise KafkaError(
                Errors.INVALID_REQUEST,
                f"The request names {len(request.groups)} groups, but {MOST_GROUPS} are allowed.",
            )
        return broker.spawn(import_groups(broker, context, request))

    return Api(ApiKey.IMPORT_GROUPS, range(1), handle, cast("ErrorFunction", error_response))


async def _import(
    imports: GroupImports, context: RequestContext, request: ImportGroupsRequest, group_id: str
) -> ImportGroupsResponse.ImportResult:
    try:
        if context.rights is not None:
            context.rights.require(AclOperation.READ, ResourceType.GROUP, group_id)
        if not group_id:
            raise KafkaError(Errors.INVALID_GROUP_ID, "The group id must not be empty.")
        outcome, count = await imports.run(ImportRequest(group_id, (), request.again, request.dry_run))
    except KafkaError as error:
        return _failed(group_id, error)
    return ImportGroupsResponse.ImportResult(group_id=group_id, outcome=outcome, offsets=count)


def error_response(request: ImportGroupsRequest, error: KafkaError, version: int) -> ImportGroupsResponse:
    return ImportGroupsResponse(results=[_failed(group_id, error) for group_id in request.groups])


def _failed(group_id: str, error: KafkaError) -> ImportGroupsResponse.ImportResult:
    return ImportGroupsResponse.ImportResult(
        group_id=group_id, error_code=error.error, error_message=error.message or error.error.description
    )
