# SPDX-License-Identifier: Apache-2.0
"""Configuration keys of brokers, topics and groups: types, defaults, ranges, checks, texts.

`keys.txt` has the tables of Kafka's keys and kcoord's own (`kcoord.*`); `keys` reads them. The way of a value:

1. `merge_properties` collects the texts. A later source wins: file, environment, overrides.
2. `BrokerConfig.from_properties` parses and checks each text, then checks that the values fit together (`checks`,
   `security`, `workers`). A ConfigError here ends the start of the broker.
3. Dynamic broker configs replace values while the broker runs. A request to change them is checked by
   `BrokerConfig.with_dynamic` and rejected as a whole. `BrokerConfig.apply_dynamic` applies the metadata log instead,
   and leaves unusable values out: a broker never stops because of a stored value.
4. `TopicConfig.resolve` and `GroupConfig.resolve` add the configs of one topic or group. They also leave unusable
   stored values out.

Nothing here is written to disk or shared between threads; the event loop applies changes. Static values come from the
properties again after a restart, dynamic ones from the metadata log.
"""

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
