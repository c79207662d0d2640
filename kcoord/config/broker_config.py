# SPDX-License-Identifier: Apache-2.0
"""BrokerConfig: settings of a broker that fit together, built from properties and changed by dynamic broker configs."""

from __future__ import annotations

from collections.abc import Mapping

from kcoord.config.broker_settings import BrokerSettings
from kcoord.config.checks import check_broker_settings
from kcoord.config.key import ConfigError
from kcoord.config.keys import BROKER_KEYS
from kcoord.config.workers import worker_properties


class BrokerConfig(BrokerSettings):
    """The checked settings of a broker."""

    @classmethod
    def from_properties(cls, properties: Mapping[str, str]) -> BrokerConfig:
        """Parses and checks settings; ConfigError names key, value and what is allowed."""
        config = cls(properties)
        config._check()
        return config

    def _check(self) -> None:
        check_broker_settings(self)
        for number in sorted(self.of_workers):
            # Before any worker starts: else one worker would end with an error that the others do not have.
            BrokerConfig.from_properties(worker_properties(self, number))

    def with_dynamic(self, overrides: Mapping[str, str]) -> BrokerConfig:
        """Returns a checked copy with other dynamic broker configs; ConfigError if they cannot be used."""
        copy = BrokerConfig(self.explicit)
        copy._values = copy._static | {
            name: BROKER_KEYS[name].parse(text) for name, text in overrides.items() if name in BROKER_KEYS
        }
        copy.dynamic = dict(overrides)
        copy._publish(copy._values)
        copy._check()
        return copy

    def apply_dynamic(self, overrides: Mapping[str, str]) -> None:
        """Makes `overrides` the dynamic broker configs in effect; a key that is no longer among them is static again.

        Keys and values that cannot be used are left out: the metadata log may come from a broker with other limits.
        """
        usable: dict[str, str] = {}
        for name, text in sorted(overrides.items()):
            try:
                self.with_dynamic(usable | {name: text})
            except ConfigError:
                continue
            usable[name] = text
        self.dynamic = usable
        parsed = {name: BROKER_KEYS[name].parse(text) for name, text in usable.items() if name in BROKER_KEYS}
        self._values = self._static | parsed
        self._publish(self._values)
