# SPDX-License-Identifier: Apache-2.0
"""AlterUserScramCredentials (KIP-554), decided by the metadata machine. No error text contains a salted password."""

from __future__ import annotations

from kcoord.metadata.machine import MetadataMachine
from kcoord.metadata.scram import changes_of
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import AlterUserScramCredentialsRequest, AlterUserScramCredentialsResponse

API_KEY = ApiKey.ALTER_USER_SCRAM_CREDENTIALS
VERSIONS = range(0, 1)


def handle(
    broker: Broker, context: RequestContext, request: AlterUserScramCredentialsRequest
) -> Reply[AlterUserScramCredentialsResponse]:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.ALTER)
    return broker.metadata.call(MetadataMachine.alter_user_scram_credentials, request, context.operation_context())


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
