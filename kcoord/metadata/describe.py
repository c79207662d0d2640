# SPDX-License-Identifier: Apache-2.0
"""What DescribeConfigs says of a resource: each key's value, where it comes from, and what else could have given it.

Observed in Kafka 4.3.1: a topic's or group's own value comes first, then the broker keys of the same meaning in the
order per-broker, cluster-wide, properties file, default; the source of a key is that of its first synonym.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum

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


class ConfigOrigin(IntEnum):
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
"""Broker keys of one meaning, the one that wins first."""


def _chain(name: str) -> Sequence[str]:
    """What gives a key its value: other keys of its meaning, and for a listener's key that of all listeners."""
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
    """Everything that gives one of `names` a value on this broker, best first."""
    names = list(names)
    layers: list[tuple[Mapping[str, str], ConfigOrigin]] = [
        (image.broker_configs(config.node_id), ConfigOrigin.DYNAMIC_BROKER_CONFIG),
        (image.broker_configs(), ConfigOrigin.DYNAMIC_DEFAULT_BROKER_CONFIG),
        (config.explicit, ConfigOrigin.STATIC_BROKER_CONFIG),
    ]
    found: list[tuple[str, str | None, ConfigOrigin]] = []
    for values, source in layers:
        found += [(name, _shown(name, values[name]), source) for name in names if name in values]
    for name in names:
        key = BROKER_KEYS.get(name)
        default = value_to_string(key.default) if key is not None else None
        if default is not None:
            found.append((name, _shown(name, default), ConfigOrigin.DEFAULT_CONFIG))
    return found


def _shown(name: str, value: str) -> str | None:
    """Nobody knows what is in a value of an unknown key, so it is treated as a secret."""
    key = broker_key(name)
    return None if key is None or key.sensitive else value


def _entry(key: ConfigKey, value: str | None, synonyms: list[tuple[str, str | None, ConfigOrigin]]) -> DescribedConfig:
    source = synonyms[0][2] if synonyms else ConfigOrigin.DEFAULT_CONFIG
    shown = None if key.sensitive else value
    return DescribedConfig(key.name, shown, source, key.type, key.doc, is_sensitive=key.sensitive, synonyms=synonyms)


def topic_config_entries(
    config: BrokerConfig, image: MetadataImage, overrides: Mapping[str, str]
) -> list[DescribedConfig]:
    """All topic keys in alphabetical order; an internal key only where the topic sets it."""
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
    """All broker keys of this broker, then dynamic configs that it does not know."""
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
    """The dynamic configs of all brokers: what DescribeConfigs says of the broker named ""."""
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
    """A key for one listener, or one that nobody knows: it has no documentation, as in Kafka."""
    key = broker_key(name)
    kind = key.type if key is not None else UNKNOWN_TYPE
    is_sensitive = key is None or key.sensitive
    shown = _shown(name, value)
    return DescribedConfig(
        name, shown, synonyms[0][2], kind, None, read_only=True, is_sensitive=is_sensitive, synonyms=synonyms
    )


def group_config_entries(config: BrokerConfig, image: MetadataImage, group_id: str) -> list[DescribedConfig]:
    """All group keys, internal ones only if the group sets them; a group that does not exist has them too."""
    overrides = image.group_configs(group_id)
    values = GroupConfig.resolve(config, overrides).values
    entries = []
    for name, key in GROUP_KEYS.items():
        if (key.internal and name not in overrides) or not config.has_key(key):
            continue
        value = value_to_string(values[name])
        broker_key = "group.streams.assignors" if name == "streams.assignor.name" else f"group.{name}"
        if broker_key in BROKER_KEYS:
            synonyms = _broker_synonyms(config, image, [broker_key])
        else:
            synonyms = [(name, value_to_string(key.default), ConfigOrigin.DEFAULT_CONFIG)]
        if name in overrides:
            synonyms.insert(0, (name, value, ConfigOrigin.GROUP_CONFIG))
        entries.append(_entry(key, value, synonyms))
    return entries


def client_metrics_entries(image: MetadataImage, name: str) -> list[DescribedConfig]:
    """The keys of a client metrics subscription, whether it is there or not."""
    overrides = image.client_metrics_configs(name)
    entries = []
    for key_name, key in CLIENT_METRICS_KEYS.items():
        value = overrides.get(key_name, value_to_string(key.default))
        own = [(key_name, value, ConfigOrigin.CLIENT_METRICS_CONFIG)] if key_name in overrides else []
        entries.append(_entry(key, value, own))
    return entries
