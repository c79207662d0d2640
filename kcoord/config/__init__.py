# SPDX-License-Identifier: Apache-2.0
"""Configuration keys of brokers, topics and groups, Kafka's and our own: types, defaults, ranges, checks, texts."""

from __future__ import annotations

from kcoord.config.broker_config import BrokerConfig
from kcoord.config.group_config import GroupConfig, check_group_configs
from kcoord.config.key import ConfigError, ConfigKey, ConfigType, ConfigValue, Effect, UpdateMode, value_to_string
from kcoord.config.keys import BROKER_KEYS, CLIENT_METRICS_KEYS, GROUP_KEYS, TOPIC_KEYS
from kcoord.config.kip1327 import Kip1327Form
from kcoord.config.listeners import Listener, SecurityProtocol
from kcoord.config.properties import merge_properties, parse_properties
from kcoord.config.topic_config import TopicConfig, check_topic_configs

__all__ = [
    "BROKER_KEYS",
    "CLIENT_METRICS_KEYS",
    "GROUP_KEYS",
    "TOPIC_KEYS",
    "BrokerConfig",
    "ConfigError",
    "ConfigKey",
    "ConfigType",
    "ConfigValue",
    "Effect",
    "GroupConfig",
    "Kip1327Form",
    "Listener",
    "SecurityProtocol",
    "TopicConfig",
    "UpdateMode",
    "check_group_configs",
    "check_topic_configs",
    "merge_properties",
    "parse_properties",
    "value_to_string",
]
