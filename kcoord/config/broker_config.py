# SPDX-License-Identifier: Apache-2.0
"""BrokerConfig: the checked settings of a broker, from properties and dynamic broker configs."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from kcoord.config.broker_settings import BrokerSettings
from kcoord.config.checks import check_broker_settings, check_dynamic_settings
from kcoord.config.key import ConfigError
from kcoord.config.keys import BROKER_KEYS
from kcoord.config.workers import worker_count, worker_properties


class BrokerConfig(BrokerSettings):
    """The settings of a broker, which fit together."""

    @classmethod
    def from_properties(cls, properties: Mapping[str, str]) -> BrokerConfig:
        """Returns the checked settings; raises ConfigError with the key, the value and the allowed values."""
        config = cls(properties)
        config._check()
        return config

    def _check(self) -> None:
        check_broker_settings(self)
        count = worker_count(self)
        # The check runs before any worker starts. Otherwise a single worker could fail while the others run. The last
        # worker has the greatest id and ports.
        for number in sorted({*self.of_workers, count - 1} if count > 1 else self.of_workers):
            try:
                BrokerConfig.from_properties(worker_properties(self, number))
            except ConfigError as error:
                raise ConfigError(f"worker {number}: {error}") from None

    def with_dynamic(self, overrides: Mapping[str, str]) -> BrokerConfig:
        """Returns a checked copy with other dynamic broker configs; raises ConfigError if they cannot be used."""
        copy = BrokerConfig(self.explicit)
        copy._values = copy._static | {
            name: BROKER_KEYS[name].parse(text) for name, text in overrides.items() if name in BROKER_KEYS
        }
        copy.dynamic = dict(overrides)
        copy._publish(copy._values)
        copy._check()
        check_dynamic_settings(copy)
        return copy

    def apply_dynamic(self, overrides: Mapping[str, str]) -> None:
        """Replaces the dynamic broker configs in effect by `overrides`. A key that is gone has its static value again.

        Keys and values that cannot be used are left out, since the metadata log may be of a broker with other limits.
        """
        usable = self.dynamic = self.usable(overrides)
        parsed = {name: BROKER_KEYS[name].parse(text) for name, text in usable.items() if name in BROKER_KEYS}
        self._values = self._static | parsed
        self._publish(self._values)

    def usable(self, overrides: Mapping[str, str]) -> dict[str, str]:
        """Returns the overrides that can be used. They are tried one by one only if they cannot be used together."""
        with suppress(ConfigError):
            self.with_dynamic(overrides)
            return dict(overrides)
        usable: dict[str, str] = {}
        for name, text in sorted(overrides.items()):
            with suppress(ConfigError):
                self.with_dynamic(usable | {name: text})
                usable[name] = text
        return usable
