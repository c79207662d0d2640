# SPDX-License-Identifier: Apache-2.0
"""AlterUserScramCredentials (KIP-554), decided by the metadata machine. No error text contains a salted password.

The keys of a user cost about 20 microseconds to compute. A request with many users is therefore decided in parts, and
other requests are served between them. Its users succeed or fail one by one, also in Kafka.
"""

from __future__ import annotations

from typing import Final

from kcoord.metadata.machine import MetadataMachine
from kcoord.metadata.scram import changes_of, parts_of
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import AlterUserScramCredentialsRequest, AlterUserScramCredentialsResponse

API_KEY = ApiKey.ALTER_USER_SCRAM_CREDENTIALS
VERSIONS = range(0, 1)
MOST_USERS: Final = 250
"""The number of users that are decided in one turn of the event loop, in a few milliseconds."""


def handle(
    broker: Broker, context: RequestContext, request: AlterUserScramCredentialsRequest
) -> Reply[AlterUserScramCredentialsResponse]:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.ALTER)
    if len(request.deletions) + len(request.upsertions) > MOST_USERS:
        return broker.spawn(_alter_in_parts(broker, context, request))
    return broker.metadata.call(MetadataMachine.alter_user_scram_credentials, request, context.operation_context())


async def _alter_in_parts(
    broker: Broker, context: RequestContext, request: AlterUserScramCredentialsRequest
) -> AlterUserScramCredentialsResponse:
    results = []
    for part in parts_of(request, MOST_USERS):
        try:
            response = await broker.metadata.call(
                MetadataMachine.alter_user_scram_credentials, part, context.operation_context()
            )
        except KafkaError as error:
            response = error_response(part, error, context.api_version)
        results += response.results
    # A sort keeps the order of the users. The failed ones are the last, as in a response to a small request.
    results.sort(key=lambda result: bool(result.error_code))
    return AlterUserScramCredentialsResponse(results=results)


def error_response(
    request: AlterUserScramCredentialsRequest, error: KafkaError, version: int
) -> AlterUserScramCredentialsResponse:
    users = dict.fromkeys(change.name for change in changes_of(request))
    return AlterUserScramCredentialsResponse(
        results=[
            AlterUserScramCredentialsResponse.AlterUserScramCredentialsResult(
                user=user, error_code=error.error, error_message=error.message
            )
            for user in users
        ]
    )
