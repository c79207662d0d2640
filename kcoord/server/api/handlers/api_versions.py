# SPDX-License-Identifier: Apache-2.0
"""ApiVersions: lists the served APIs and the features (KIP-584) of the metadata image.

The list is made from the table that serves the APIs. The name of the client's software selects the table
(`kcoord.kip1327.revisions`).

From v5 on a client may name the cluster and the broker that it expects (KIP-1242). Another broker answers
REBOOTSTRAP_REQUIRED.

A request in an unknown version (KIP-511) gets a v0 response with UNSUPPORTED_VERSION and the range of ApiVersions
itself.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kcoord.config import BrokerConfig
from kcoord.metadata.records import supported_features
from kcoord.server.api.api_table import ApiTable, RequestContext
from kcoord.server.api.served_versions import TELEMETRY_APIS
from kcoord.server.broker import Broker
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.framing import encode_response
from kcoord_protocol.messages import ApiVersionsRequest, ApiVersionsResponse

API_KEY = ApiKey.API_VERSIONS
VERSIONS = range(0, 6)

FIRST_VERSION_WITH_SOFTWARE_NAME = 3
FIRST_VERSION_WITH_ZERO_FEATURE_LEVELS = 4
UNKNOWN_NODE_ID = -1

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
"""KIP-511 allows letters, digits, '-' and '.'; the first and the last character must be a letter or a digit."""


def handle(broker: Broker, context: RequestContext, request: ApiVersionsRequest) -> ApiVersionsResponse:
    check(request, context.api_version, broker.cluster_id, broker.node_id)
    apis = broker.apis.in_form(broker.config.kip1327_form(request.client_software_name))
    context.client.identify(request.client_software_name, request.client_software_version, apis.form)
    image = broker.image
    return ApiVersionsResponse(
        api_keys=listed_versions(apis, broker.config),
        supported_features=supported_feature_keys(
            supported_features(broker.config.kcoord_release), context.api_version
        ),
        finalized_features_epoch=image.epoch,
        finalized_features=[
            ApiVersionsResponse.FinalizedFeatureKey(name=name, max_version_level=level, min_version_level=level)
            for name, level in sorted(image.features.items())
            if level > 0
        ],
    )


def check(request: ApiVersionsRequest, version: int, cluster_id: str, node_id: int) -> None:
    """Raises KafkaError if the request is not valid, or if the client expects another cluster or broker."""
    if version >= FIRST_VERSION_WITH_SOFTWARE_NAME and not _is_valid(request):
        raise KafkaError(Errors.INVALID_REQUEST)
    if request.cluster_id is not None and (request.cluster_id, request.node_id) != (cluster_id, node_id):
        raise KafkaError(Errors.REBOOTSTRAP_REQUIRED)


def _is_valid(request: ApiVersionsRequest) -> bool:
    """Returns whether the software is valid (KIP-511), and cluster and node are given together or not at all.

    Requests before v5 have neither cluster nor node.
    """
    name, version = request.client_software_name, request.client_software_version
    if (request.cluster_id is None) != (request.node_id == UNKNOWN_NODE_ID):
        return False
    return _SOFTWARE.fullmatch(name) is not None and _SOFTWARE.fullmatch(version) is not None


def listed_versions(apis: ApiTable, config: BrokerConfig) -> list[ApiVersionsResponse.ApiVersion]:
    """Returns the listed versions of all APIs.

    The telemetry APIs are listed only if the broker takes the metrics that clients push, as in Kafka 4.3.1.
    """
    return [
        ApiVersionsResponse.ApiVersion(
            api_key=api.key, min_version=api.listed_versions.start, max_version=api.listed_versions.stop - 1
        )
        for api in apis.apis.values()
        if config.takes_client_telemetry or api.key not in TELEMETRY_APIS
    ]


def supported_feature_keys(
    features: Mapping[str, tuple[int, int]], version: int
) -> list[ApiVersionsResponse.SupportedFeatureKey]:
    """Returns features with their lowest and highest levels for a version of the response.

    Before v4 a response cannot express a lowest level of 0 (KIP-1022 defines it for v4), so such features are omitted.
    """
    return [
        ApiVersionsResponse.SupportedFeatureKey(name=name, min_version=lowest, max_version=highest)
        for name, (lowest, highest) in features.items()
        if lowest > 0 or version >= FIRST_VERSION_WITH_ZERO_FEATURE_LEVELS
    ]


def unsupported_version_response(broker: Broker, correlation_id: int) -> bytes:
    """Returns the framed response to an ApiVersions request in an unknown version, whose body cannot be decoded."""
    served = broker.apis.apis[API_KEY].versions
    own_range = ApiVersionsResponse.ApiVersion(api_key=API_KEY, min_version=served.start, max_version=served.stop - 1)
    response = ApiVersionsResponse(error_code=Errors.UNSUPPORTED_VERSION, api_keys=[own_range])
    return encode_response(correlation_id, API_KEY, 0, response.encode(0))


def error_response(request: ApiVersionsRequest, error: KafkaError, version: int) -> ApiVersionsResponse:
    return ApiVersionsResponse(error_code=error.error)
