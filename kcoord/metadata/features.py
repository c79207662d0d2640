# SPDX-License-Identifier: Apache-2.0
"""UpdateFeatures (KIP-584, KIP-1022): a pure function from image and request to records and response.

An update of several features is atomic: if one update is rejected, the whole request fails. The error texts are those
of Kafka 4.3.1 and 4.4.0. Version 0 of the request has a field AllowDowngrade, which Kafka does not read. That version
therefore cannot lower a level.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING, Final

from kcoord.metadata.image import MetadataImage
from kcoord.metadata.records import new_feature_level_record, supported_features
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import UpdateFeaturesRequest, UpdateFeaturesResponse

if TYPE_CHECKING:
    from kcoord.config import BrokerConfig

GROUP_VERSION: Final = "group.version"
METADATA_VERSION: Final = "metadata.version"
TRANSACTION_VERSION: Final = "transaction.version"
SERVED: Final = frozenset((GROUP_VERSION, METADATA_VERSION, TRANSACTION_VERSION))
"""The features whose levels kcoord implements. Those of other features cannot be raised."""
_LAST_VERSION_WITH_RESULTS: Final = 1
_NO_ERROR_TEXT: Final = "NONE"
"""The error message that Kafka 4.3.1 returns in a result without an error."""
_REFUSED: Final = "The update failed for all features since the following feature had an error: "


class FeatureUpgradeType(IntEnum):
    """The upgrade types of UpdateFeatures, with their codes on the wire."""

    UPGRADE = 1
    SAFE_DOWNGRADE = 2
    UNSAFE_DOWNGRADE = 3


def update_features(
    image: MetadataImage, config: BrokerConfig, context: OperationContext, request: UpdateFeaturesRequest
) -> CoordinatorResult[UpdateFeaturesResponse]:
    """Raises INVALID_UPDATE_VERSION if any update is rejected. If a feature is named twice, the last update counts."""
    response = UpdateFeaturesResponse(error_message=None)
    result = CoordinatorResult(response)
    for name, update in sorted({update.feature: update for update in request.feature_updates}.items()):
        current = image.features.get(name, 0)
        reason = _reason_to_refuse(config, current, update)
        if reason is not None:
            raise KafkaError(Errors.INVALID_UPDATE_VERSION, _REFUSED + reason)
        if update.max_version_level != current and not request.validate_only:
            result.records.append(new_feature_level_record(name, update.max_version_level))
    if context.api_version <= _LAST_VERSION_WITH_RESULTS:
        response.results = [
            UpdateFeaturesResponse.UpdatableFeatureResult(feature=update.feature, error_message=_NO_ERROR_TEXT)
            for update in request.feature_updates
        ]
    return result


def _reason_to_refuse(config: BrokerConfig, current: int, update: UpdateFeaturesRequest.FeatureUpdateKey) -> str | None:
    name, level, node_id = update.feature, update.max_version_level, config.node_id
    invalid = f"Invalid update version {level} for feature {name}."
    if update.upgrade_type not in tuple(FeatureUpgradeType):
        return f"{invalid} The controller does not support the given upgrade type."
    if level < 0:
        return f"{invalid} A feature version cannot be less than 0."
    supported = supported_features(config.kcoord_release).get(name)
    if supported is None and level == 0:
        return f"{invalid} Feature {name} not found."
    if supported is not None and not supported[0] <= level <= supported[1]:
        return f"{invalid} Local controller {node_id} only supports versions {supported[0]}-{supported[1]}"
    if supported is None or (level > current and name not in SERVED):
        return f"{invalid} Local controller {node_id} does not support this feature."
    if level >= current:
        return None
    if update.upgrade_type == FeatureUpgradeType.UPGRADE:
        return (
            f"{invalid} Can't downgrade the version of this feature without setting the upgrade type to either safe or "
            "unsafe downgrade."
        )
    if name == METADATA_VERSION:
        return f"Unsupported metadata.version downgrade from {current} to {level}. " + (
            "Refusing to perform the requested downgrade because it might delete metadata information."
            if update.upgrade_type == FeatureUpgradeType.SAFE_DOWNGRADE
            else "Unsafe metadata downgrade is not supported in this version."
        )
    return None
