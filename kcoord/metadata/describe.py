# SPDX-License-Identifier: Apache-2.0
"""The answer of DescribeConfigs for a resource: the value of each key, its source, and its synonyms.

Observed in Kafka 4.3.1: a topic's or group's own value comes first. The broker keys of the same meaning follow, in the
order per-broker, cluster-wide, properties file, default. The source of a key is the source of its first synonym.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from kcoord.config import (
    BROKER_KEYS,
    CLIENT_METRICS_KEYS,
    GROUP_KEYS,
    TOPIC_KEYS,
    BrokerConfig,
    ConfigKey,
    GroupConfig,
    TopicConfig,
    value_to_string,
)
from kcoord.config.keys import broker_key
from kcoord.config.listeners import key_of_listener
from kcoord.metadata.image import MetadataImage

UNKNOWN_TYPE = 0
_CLIENT_ASSIGNOR_KEY: Final = "kcoord.client.assignor.fallback"
_BROKER_KEY_OF_GROUP_KEY: Final = {
    _CLIENT_ASSIGNOR_KEY: _CLIENT_ASSIGNOR_KEY,
    "streams.assignor.name": "group.streams.assignors",
}
"""The broker key that gives a group key its default, if it is not the name with the prefix `group.`."""


class ConfigOrigin(IntEnum):
    """Where a value comes from: the codes of `configSource` in DescribeConfigs."""

    UNKNOWN = 0
    DYNAMIC_TOPIC_CONFIG = 1
    DYNAMIC_BROKER_CONFIG = 2
    DYNAMIC_DEFAULT_BROKER_CONFIG = 3
    STATIC_BROKER_CONFIG = 4
    DEFAULT_CONFIG = 5
    DYNAMIC_BROKER_LOGGER_CONFIG = 6
    CLIENT_METRICS_CONFIG = 7
    GROUP_CONFIG = 8


@dataclass(slots=True)
class DescribedConfig:
    """One described key; `synonyms` are (name, value, source)."""

    name: str
    value: str | None
    source: ConfigOrigin
    type: int
    doc: str | None
    read_only: bool = False
    is_sensitive: bool = False
    synonyms: list[tuple[str, str | None, ConfigOrigin]] = field(default_factory=list)


_BROKER_CHAINS: Sequence[Sequence[str]] = (
    *([broker_key for broker_key, _ in key.synonyms] for key in TOPIC_KEYS.values()),
    ("node.id", "broker.id"),
)
"""Broker keys of the same meaning; the first key that is set wins."""


def _chain(name: str) -> Sequence[str]:
    """Returns the keys that can give a key its value, the best first.

    These are the broker keys of the same meaning. For the key of a listener, they are the key itself and the key for
    all listeners.
    """
    key = key_of_listener(name)
    if key is not None:
        return (name, key)
    for chain in _BROKER_CHAINS:
        if name in chain:
            return chain[chain.index(name) :]
    return (name,)


def _broker_synonyms(
    config: BrokerConfig, image: MetadataImage, names: Iterable[str]
) -> list[tuple[str, str | None, ConfigOrigin]]:
    """Returns all values of the keys `names` on this broker, the best first."""
    names = list(names)
    layers: list[tuple[Mapping[str, str], ConfigOrigin]] = [
        (image.broker_configs(config.node_id), ConfigOrigin.DYNAMIC_BROKER_CONFIG),
        (image.broker_configs(), ConfigOrigin.DYNAMIC_DEFAULT_BROKER_CONFIG),
        (config.explicit, ConfigOrigin.STATIC_BROKER_CONFIG),
    ]
    synonyms: list[tuple[str, str | None, ConfigOrigin]] = []
    for values, source in layers:
        synonyms += [(name, _shown(name, values[name]), source) for name in names if name in values]
    for name in names:
        key = BROKER_KEYS.get(name)
        default = value_to_string(key.default) if key is not None else None
        if default is not None:
            synonyms.append((name, _shown(name, default), ConfigOrigin.DEFAULT_CONFIG))
    return synonyms


def _shown(name: str, value: str) -> str | None:
    """Returns a value as clients may see it. The value of an unknown key may be a secret, so it is hidden."""
    key = broker_key(name)
    return None if key is None or key.sensitive else value


def _entry(key: ConfigKey, value: str | None, synonyms: list[tuple[str, str | None, ConfigOrigin]]) -> DescribedConfig:
    source = synonyms[0][2] if synonyms else ConfigOrigin.DEFAULT_CONFIG
    shown = None if key.sensitive else value
    return DescribedConfig(key.name, shown, source, key.type, key.doc, is_sensitive=key.sensitive, synonyms=synonyms)


def topic_config_entries(
    config: BrokerConfig, image: MetadataImage, overrides: Mapping[str, str]
) -> list[DescribedConfig]:
    """Returns all topic keys in alphabetical order. An internal key is included only if the topic sets it."""
    values = TopicConfig.resolve(config, overrides).values
    entries = []
    for name, key in TOPIC_KEYS.items():
        if (key.internal and name not in overrides) or not config.has_key(key):
            continue
        value = value_to_string(values[name])
        synonyms = _broker_synonyms(config, image, [broker_key for broker_key, _ in key.synonyms])
        if name in overrides:
            synonyms.insert(0, (name, value, ConfigOrigin.DYNAMIC_TOPIC_CONFIG))
        entries.append(_entry(key, value, synonyms))
    return entries


def broker_config_entries(config: BrokerConfig, image: MetadataImage) -> list[DescribedConfig]:
    """Returns all broker keys of this broker, then keys that were set but are not in the table of keys."""
    entries = []
    dynamic = image.effective_broker_configs(config.node_id)
    for name, key in BROKER_KEYS.items():
        if (key.internal and name not in dynamic and name not in config.explicit) or not config.has_key(key):
            continue
        entry = _entry(key, value_to_string(config.value(name)), _broker_synonyms(config, image, _chain(name)))
        entry.read_only = not key.dynamic
        entries.append(entry)
    for name, value in sorted({**config.explicit, **dynamic}.items()):
        if name not in BROKER_KEYS:
            entries.append(_undefined_entry(name, value, _broker_synonyms(config, image, _chain(name))))
    return entries


def cluster_config_entries(image: MetadataImage) -> list[DescribedConfig]:
    """Returns the dynamic configs of all brokers, for the broker named "" in DescribeConfigs."""
    entries = []
    for name, value in sorted(image.broker_configs().items()):
        synonyms = [(name, _shown(name, value), ConfigOrigin.DYNAMIC_DEFAULT_BROKER_CONFIG)]
        key = BROKER_KEYS.get(name)
        if key is None:
            entries.append(_undefined_entry(name, value, synonyms))
            continue
        entry = _entry(key, value, synonyms)
        entry.read_only = not key.dynamic
        entries.append(entry)
    return entries


def _undefined_entry(name: str, value: str, synonyms: list[tuple[str, str | None, ConfigOrigin]]) -> DescribedConfig:
    """Returns the entry of a key of a listener, or of an unknown key. As in Kafka, it has no documentation."""
    key = broker_key(name)
    kind = key.type if key is not None else UNKNOWN_TYPE
    is_sensitive = key is None or key.sensitive
    shown = _shown(name, value)
    return DescribedConfig(
        name, shown, synonyms[0][2], kind, None, read_only=True, is_sensitive=is_sensitive, synonyms=synonyms
    )


def group_config_entries(config: BrokerConfig, image: MetadataImage, group_id: str) -> list[DescribedConfig]:
    """Returns all group keys, also for a group that does not exist.

    A key is included only if the group sets it, if the key is internal or belongs to client-side assignors, which this
    broker does not serve. So the response of such a broker is Kafka's.
    """
    overrides = image.group_configs(group_id)
    values = GroupConfig.resolve(config, overrides).values
    entries = []
    for name, key in GROUP_KEYS.items():
        is_optional = key.internal or (name == _CLIENT_ASSIGNOR_KEY and not config.kcoord_client_assignors_enable)
        if (is_optional and name not in overrides) or not config.has_key(key):
            continue
        value = value_to_string(values[name])
        broker_key = _BROKER_KEY_OF_GROUP_KEY.get(name, f"group.{name}")
        if broker_key in BROKER_KEYS:
            synonyms = _broker_synonyms(config, image, [broker_key])
        else:
            synonyms = [(name, value_to_string(key.default), ConfigOrigin.DEFAULT_CONFIG)]
        if name in overrides:
            synonyms.insert(0, (name, value, ConfigOrigin.GROUP_CONFIG))
        entries.append(_entry(key, value, synonyms))
    return entries


def client_metrics_entries(image: MetadataImage, name: str) -> list[DescribedConfig]:
    """Returns the keys of a client metrics subscription, also if it does not exist."""
    overrides = image.client_metrics_configs(name)
    entries = []
    for key_name, key in CLIENT_METRICS_KEYS.items():
        value = overrides.get(key_name, value_to_string(key.default))
        own = [(key_name, value, ConfigOrigin.CLIENT_METRICS_CONFIG)] if key_name in overrides else []
        entries.append(_entry(key, value, own))
    return entries
