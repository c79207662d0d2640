# SPDX-License-Identifier: Apache-2.0
"""Keys for one listener: `listener.name.NAME.KEY`, and `listener.name.NAME.MECHANISM.KEY` for one SASL mechanism of it.

They are kept, checked and described as in Kafka 4.3.1. None of them has an effect here.
"""

from __future__ import annotations

from kcoord.config.broker_config import BROKER_KEYS
from kcoord.config.key import ConfigKey
from kcoord.config.listeners import key_of_listener

CLUSTER_WIDE_KEYS = frozenset({"max.connections", "max.connection.creation.rate", "num.network.threads"})
"""Keys that may be set for one listener of all brokers; any other one is set for a listener of one broker."""


def broker_key(name: str) -> ConfigKey | None:
    """What is known of a broker key, also where it is one for a listener."""
    return BROKER_KEYS.get(key_of_listener(name) or name)


def is_for_one_broker(name: str) -> bool:
    """Whether it is a key for a listener that cannot be set for all brokers."""
    key = key_of_listener(name)
    return key is not None and key not in CLUSTER_WIDE_KEYS
