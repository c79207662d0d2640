# SPDX-License-Identifier: Apache-2.0
"""DescribeUserScramCredentials (KIP-554): kcoord has no users, so no user has a credential."""

from __future__ import annotations

from kcoord.metadata.collect import duplicates
from kcoord.server.api.api_table import RequestContext
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import DescribeUserScramCredentialsRequest, DescribeUserScramCredentialsResponse

API_KEY = ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS
VERSIONS = range(0, 1)

Result = DescribeUserScramCredentialsResponse.DescribeUserScramCredentialsResult


def handle(
    broker: Broker, context: RequestContext, request: DescribeUserScramCredentialsRequest
) -> DescribeUserScramCredentialsResponse:
    names = [user.name for user in request.users or ()]
    repeated = duplicates(names)
    return DescribeUserScramCredentialsResponse(
        results=[_repeated(name) if name in repeated else _missing(name) for name in dict.fromkeys(names)]
    )


def _repeated(name: str) -> Result:
    text = f"Cannot describe SCRAM credentials for the same user twice in a single request: {name}"
    return Result(user=name, error_code=Errors.DUPLICATE_RESOURCE, error_message=text)


def _missing(name: str) -> Result:
    text = f"Attempt to describe a user credential that does not exist: {name}"
    return Result(user=name, error_code=Errors.RESOURCE_NOT_FOUND, error_message=text)


def error_response(
    request: DescribeUserScramCredentialsRequest, error: KafkaError, version: int
) -> DescribeUserScramCredentialsResponse:
    return DescribeUserScramCredentialsResponse(error_code=error.error, error_message=error.message)
