# SPDX-License-Identifier: Apache-2.0
"""The first records of a metadata log: the feature levels of a new cluster, and its first users."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from kcoord.config import BrokerConfig
from kcoord.config.scram_users import ScramUser
from kcoord.metadata.records import BOOTSTRAP_FEATURES, new_feature_level_record
from kcoord.metadata.scram import credential_record
from kcoord.runtime.result import CoordinatorRecord


def feature_records(config: BrokerConfig) -> list[CoordinatorRecord]:
    """Returns the feature levels of a new cluster. As in Kafka, a feature at level 0 has no record."""
    levels = dict(BOOTSTRAP_FEATURES)
    for setting in config.kcoord_bootstrap_features:
        name, _, level = setting.partition("=")
        levels[name] = int(level)
    return [new_feature_level_record(name, level) for name, level in levels.items() if level > 0]


def credential_records(users: Iterable[ScramUser], new_salt: Callable[[], bytes]) -> list[CoordinatorRecord]:
    """Returns the SCRAM credentials of users. `new_salt` returns a random salt, for users that have none."""
    import hashlib

    made = []
    for user in users:
        salt = user.salt if user.salt is not None else new_salt()
        if user.password is None:
            assert user.salted_password is not None, "a user has one of the two"
            salted_password = user.salted_password
        else:
            salted_password = hashlib.pbkdf2_hmac(
                user.mechanism.hash_name, user.password.encode(), salt, user.iterations
            )
        made.append(credential_record(user.mechanism, user.name, salt, salted_password, user.iterations))
    return made
