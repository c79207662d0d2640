# SPDX-License-Identifier: Apache-2.0
"""Features of the cluster and their levels (KIP-584): describe, update."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kcoord.client.admin.model import FeatureMetadata, FeatureUpdate
from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.repeat import repeat
from kcoord.client.results import outcome_of
from kcoord.client.version import SOFTWARE_NAME, SOFTWARE_VERSION
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)

_FIRST_VERSION_WITH_FEATURES: Final = 3
_FIRST_VERSION_WITH_UPGRADE_TYPE: Final = 1


async def describe_features(cluster: Cluster) -> FeatureMetadata:
    request = ApiVersionsRequest(client_software_name=SOFTWARE_NAME, client_software_version=SOFTWARE_VERSION)
    response = await cluster.call_any(request, ApiVersionsResponse, lowest=_FIRST_VERSION_WITH_FEATURES)
    epoch = response.finalized_features_epoch
    return FeatureMetadata(
        {feature.name: feature.max_version_level for feature in response.finalized_features},
        epoch if epoch >= 0 else None,
        {feature.name: (feature.min_version, feature.max_version) for feature in response.supported_features},
    )


async def update_features(
    cluster: Cluster, deadline: Deadline, updates: Mapping[str, FeatureUpdate], validate_only: bool
) -> dict[str, KafkaError | None]:
    async def attempt(names: list[str]) -> Mapping[str, KafkaError | None]:
        request = UpdateFeaturesRequest(
            timeout_ms=max(int(deadline.left_ms()), 1),
            feature_updates=[_update(name, updates[name]) for name in names],
            validate_only=validate_only,
        )
        response = await cluster.call_controller(
            request, UpdateFeaturesResponse, lowest=_FIRST_VERSION_WITH_UPGRADE_TYPE
        )
        outcome: KafkaError | None = outcome_of(response.error_code, response.error_message, None)
        outcomes = dict.fromkeys(names, outcome)
        if outcome is None:
            # Responses below v2 can have one result per feature.
            outcomes |= {
                result.feature: outcome_of(result.error_code, result.error_message, None) for result in response.results
            }
        return outcomes

    return await repeat(cluster, deadline, updates, attempt)


def _update(name: str, update: FeatureUpdate) -> UpdateFeaturesRequest.FeatureUpdateKey:
    return UpdateFeaturesRequest.FeatureUpdateKey(
        feature=name, max_version_level=update.max_version_level, upgrade_type=update.upgrade_type
    )
