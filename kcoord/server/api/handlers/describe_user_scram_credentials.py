# SPDX-License-Identifier: Apache-2.0
"""DescribeUserScramCredentials (KIP-554), answered from the published image."""

from __future__ import annotations

from kcoord.metadata.scram import describe_user_scram_credentials
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import LARGE_RESPONSE_ITEMS, Broker
from kcoord.server.replies import Reply
from kcoord_protocol.acls import AclOperation
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import DescribeUserScramCredentialsRequest, DescribeUserScramCredentialsResponse

API_KEY = ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS
VERSIONS = range(0, 1)


def handle(
    broker: Broker, context: RequestContext, request: DescribeUserScramCredentialsRequest
) -> Reply[DescribeUserScramCredentialsResponse]:
    if context.rights is not None:
        context.rights.require_cluster(AclOperation.DESCRIBE)
    image = broker.image

    def describe() -> DescribeUserScramCredentialsResponse:
        users = [user.name for user in request.users or ()]
        return DescribeUserScramCredentialsResponse(results=describe_user_scram_credentials(image, users))

    if len(request.users or image.scram_credentials) > LARGE_RESPONSE_ITEMS:
        return broker.spawn(broker.made_in_thread(describe, context.api_version))
    return describe()


def error_response(
    request: DescribeUserScramCredentialsRequest, error: KafkaError, version: int
) -> DescribeUserScramCredentialsResponse:
    return DescribeUserScramCredentialsResponse(error_code=error.error, error_message=error.message)
