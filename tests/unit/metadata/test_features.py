# SPDX-License-Identifier: Apache-2.0
"""UpdateFeatures: levels, atomicity, and errors with the texts of Kafka 4.3.1 for the same requests."""

from __future__ import annotations

import pytest

from kcoord.metadata import records
from kcoord.server.api.handlers import update_features
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import UpdateFeaturesRequest, UpdateFeaturesResponse
from tests.unit.metadata.cluster import Cluster
from tests.unit.metadata.serving import broker_of, context, settle

PREFIX = "The update failed for all features since the following feature had an error: "
LOWER_NEEDS_TYPE = (
    "Can't downgrade the version of this feature without setting the upgrade type to either safe or unsafe downgrade."
)
ALL_LEVELS = {"metadata.version": 30, "group.version": 1, "transaction.version": 2}
UPGRADE, SAFE, UNSAFE = 1, 2, 3


def update(name: str, level: int, upgrade_type: int = UPGRADE) -> UpdateFeaturesRequest.FeatureUpdateKey:
    return UpdateFeaturesRequest.FeatureUpdateKey(feature=name, max_version_level=level, upgrade_type=upgrade_type)


def run(
    cluster: Cluster, *updates: UpdateFeaturesRequest.FeatureUpdateKey, validate_only: bool = False, version: int = 1
) -> UpdateFeaturesResponse:
    request = UpdateFeaturesRequest(feature_updates=list(updates), validate_only=validate_only)
    return cluster.run(lambda machine, context: machine.update_features(context, request), version)


def refusal(cluster: Cluster, *updates: UpdateFeaturesRequest.FeatureUpdateKey) -> str:
    size = len(cluster.log)
    with pytest.raises(KafkaError) as caught:
        run(cluster, *updates)
    assert caught.value.error is Errors.INVALID_UPDATE_VERSION
    assert len(cluster.log) == size
    return str(caught.value.message).removeprefix(PREFIX)


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (
            update("nope", 1),
            "Invalid update version 1 for feature nope. Local controller 1 does not support this feature.",
        ),
        (update("nope", 0, SAFE), "Invalid update version 0 for feature nope. Feature nope not found."),
        (
            update("group.version", 2),
            "Invalid update version 2 for feature group.version. Local controller 1 only supports versions 0-1",
        ),
        (
            update("group.version", -1),
            "Invalid update version -1 for feature group.version. A feature version cannot be less than 0.",
        ),
        (update("group.version", 0), f"Invalid update version 0 for feature group.version. {LOWER_NEEDS_TYPE}"),
        (
            update("group.version", 0, 0),
            "Invalid update version 0 for feature group.version. The controller does not support the given upgrade "
            "type.",
        ),
        (
            update("transaction.version", 1),
            f"Invalid update version 1 for feature transaction.version. {LOWER_NEEDS_TYPE}",
        ),
        (
            update("metadata.version", 31),
            "Invalid update version 31 for feature metadata.version. Local controller 1 only supports versions 7-30",
        ),
        (
            update("metadata.version", 29, SAFE),
            "Unsupported metadata.version downgrade from 30 to 29. Refusing to perform the requested downgrade because "
            "it might delete metadata information.",
        ),
        (
            update("metadata.version", 7, UNSAFE),
            "Unsupported metadata.version downgrade from 30 to 7. Unsafe metadata downgrade is not supported in this "
            "version.",
        ),
    ],
)
def test_refusals(asked: UpdateFeaturesRequest.FeatureUpdateKey, text: str) -> None:
    cluster = Cluster({"node.id": "1", "kcoord.release": "4.3"})
    assert refusal(cluster, asked) == text
    assert refusal(cluster, update("transaction.version", 0, SAFE), asked) == text
    assert cluster.image.features == ALL_LEVELS


@pytest.mark.parametrize("name", ["eligible.leader.replicas.version", "kraft.version"])
def test_levels_of_features_that_are_not_implemented_can_be_removed_but_not_raised(name: str) -> None:
    cluster = Cluster()
    assert refusal(cluster, update(name, 1)).endswith("does not support this feature.")
    cluster.machine.replay(records.new_feature_level_record(name, 1))
    run(cluster, update(name, 0, SAFE))
    assert cluster.image.features == ALL_LEVELS


@pytest.mark.parametrize("upgrade_type", [SAFE, UNSAFE])
def test_a_level_is_lowered_and_raised_again(cluster: Cluster, upgrade_type: int) -> None:
    response = run(cluster, update("group.version", 0, upgrade_type), update("transaction.version", 1, upgrade_type))
    assert cluster.image.features == {"metadata.version": 30, "transaction.version": 1}
    assert [(result.feature, result.error_code, result.error_message) for result in response.results] == [
        ("group.version", 0, "NONE"),
        ("transaction.version", 0, "NONE"),
    ]
    run(cluster, update("group.version", 1), update("transaction.version", 2))
    assert cluster.image.features == ALL_LEVELS


def test_the_last_update_of_a_feature_counts(cluster: Cluster) -> None:
    response = run(cluster, update("group.version", 1), update("group.version", 0, SAFE))
    assert "group.version" not in cluster.image.features
    assert len(response.results) == 2


def test_nothing_is_written_for_a_level_that_stays_or_is_only_validated(cluster: Cluster) -> None:
    size = len(cluster.log)
    run(cluster, update("group.version", 1, SAFE))
    run(cluster, update("group.version", 0, SAFE), validate_only=True)
    run(cluster)
    assert len(cluster.log) == size


def test_levels_survive_a_restart(cluster: Cluster) -> None:
    run(cluster, update("group.version", 0, SAFE), update("transaction.version", 0, SAFE))
    cluster.register(*[])
    assert cluster.image.features == {"metadata.version": 30}


@pytest.mark.parametrize("version", update_features.VERSIONS)
async def test_handler(cluster: Cluster, version: int) -> None:
    request = UpdateFeaturesRequest(
        feature_updates=[UpdateFeaturesRequest.FeatureUpdateKey(feature="group.version", max_version_level=1)]
    )
    request = UpdateFeaturesRequest.decode(request.encode(version), version)
    asked = context(ApiKey.UPDATE_FEATURES, version)
    response = await settle(update_features.handle(broker_of(cluster), asked, request), version)
    assert (response.error_code, response.error_message) == (0, None)
    assert [result.feature for result in response.results] == (["group.version"] if version < 2 else [])
    error = KafkaError(Errors.INVALID_UPDATE_VERSION, "no")
    failed = await settle(update_features.error_response(request, error, version), version)
    assert (failed.error_code, failed.error_message) == (Errors.INVALID_UPDATE_VERSION, "no")


def test_version_0_cannot_lower_a_level(cluster: Cluster) -> None:
    """Kafka 4.3.1 does not read AllowDowngrade either."""
    asked = UpdateFeaturesRequest.FeatureUpdateKey(feature="group.version", max_version_level=0, allow_downgrade=True)
    request = UpdateFeaturesRequest(feature_updates=[asked])
    request = UpdateFeaturesRequest.decode(request.encode(0), 0)
    assert refusal(cluster, *request.feature_updates).endswith(LOWER_NEEDS_TYPE)


def test_the_release_limits_metadata_version() -> None:
    """Kafka 4.4.0 has levels up to 33."""
    cluster = Cluster({"kcoord.release": "4.4", "node.id": "1"})
    assert refusal(cluster, update("metadata.version", 34)).endswith("Local controller 1 only supports versions 7-33")
    run(cluster, update("metadata.version", 33))
    assert cluster.image.features["metadata.version"] == 33
    assert refusal(cluster, update("metadata.version", 30, SAFE)).startswith(
        "Unsupported metadata.version downgrade from 33 to 30."
    )
