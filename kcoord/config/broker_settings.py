# SPDX-License-Identifier: Apache-2.0
"""BrokerSettings: the values of all broker keys, and values that follow from several keys. `BrokerConfig` checks them.

Keys that Kafka knows and this broker does not use are checked and kept, but have no annotated attribute.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from kcoord.config.attributes import BrokerAttributes
from kcoord.config.key import ConfigError, ConfigKey, ConfigValue
from kcoord.config.keys import BROKER_KEYS, is_without_effect
from kcoord.config.kip1327 import Kip1327Form, form_of
from kcoord.config.listeners import Listener, SecurityProtocol, key_of_listener, parse_listeners, parse_protocol_map
from kcoord.config.principals import parse_listener_principals
from kcoord.config.scram_users import ScramUser, parse_bootstrap_scram

_OF_ONE_WORKER = re.compile(r"kcoord\.worker\.(?P<number>\d{1,4})\.(?P<key>.+)")
"""A key for one of several workers, counted from 0. It takes precedence over the key for all workers."""

PASS_THROUGH = "pass-through"
"""The value of kcoord.upstream.authentication with which the upstream decides about the logins of clients."""
UPSTREAM_KEY = "kcoord.upstream.bootstrap.servers"
NODE_ID_BEFORE_UPSTREAM = 1_000_000
"""The default of node.id if UPSTREAM_KEY is set. No broker of the upstream can have the same id."""

JMX_REPORTER = "org.apache.kafka.common.metrics.JmxReporter"

KNOWN_CONSUMER_ASSIGNORS = {
    "uniform": "uniform",
    "range": "range",
    "uniform-rack": "uniform-rack",
    "org.apache.kafka.coordinator.group.assignor.UniformAssignor": "uniform",
    "org.apache.kafka.coordinator.group.assignor.RangeAssignor": "range",
}
"""The built-in assignors by the names that group.consumer.assignors may use."""


class BrokerSettings(BrokerAttributes):
    """All broker settings in effect. Attributes are named like the keys, with `_` for `.`."""

    def __init__(self, explicit: Mapping[str, str]) -> None:
        """Parses the settings. `BrokerConfig.from_properties` also checks that they fit together."""
        self.explicit: Mapping[str, str] = dict(explicit)
        """The keys that were set, as text."""
        self.dynamic: Mapping[str, str] = {}
        """Dynamic broker configs in effect, as text."""
        self.further_checks: list[Callable[[BrokerSettings], None]] = []
        """Each raises ConfigError for settings that cannot replace these, for reasons that values alone do not show."""
        self.ignored: list[str] = []
        """Keys that were set, and that Kafka knows, but that have no effect here."""
        self.unknown: list[str] = []
        """Keys that were set, but that neither Kafka nor kcoord knows."""
        self.of_workers: dict[int, dict[str, str]] = {}
        """The keys that were set for single workers (`kcoord.worker.N.KEY`), by the workers' numbers from 0."""
        self.consumer_assignors: list[str] = []
        """group.consumer.assignors with the assignors' own names, which members and records use."""
        self._assignor_names = dict(KNOWN_CONSUMER_ASSIGNORS)
        self._static: dict[str, ConfigValue] = {name: key.default for name, key in BROKER_KEYS.items()}
        for name, text in explicit.items():
            self._set_static(name, text)
        if "node.id" not in explicit and "broker.id" in explicit:
            self._static["node.id"] = BROKER_KEYS["node.id"].parse(explicit["broker.id"])
        elif "node.id" not in explicit and self._static[UPSTREAM_KEY]:
            self._static["node.id"] = NODE_ID_BEFORE_UPSTREAM
        self._values = self._static
        self._publish(self._static)

    def _set_static(self, name: str, text: str) -> None:
        of_worker = _OF_ONE_WORKER.fullmatch(name)
        if of_worker is not None:
            self._set_for_worker(int(of_worker["number"]), of_worker["key"], text)
            return
        key_of_one_listener = BROKER_KEYS.get(key_of_listener(name) or "")
        if name in BROKER_KEYS:
            self._static[name] = BROKER_KEYS[name].parse(text)
        elif key_of_one_listener is not None:
            key_of_one_listener.parse(text)
        elif not is_without_effect(name):
            self.unknown.append(name)
        if is_without_effect(name):
            self.ignored.append(name)

    def _set_for_worker(self, number: int, name: str, text: str) -> None:
        key = BROKER_KEYS.get(name)
        if key is None or key.same_for_all_workers:
            reason = "the key does not exist" if key is None else "all workers must have the same value"
            raise ConfigError(f"{name} cannot be set for worker {number}: {reason}")
        key.parse(text)
        self.of_workers.setdefault(number, {})[name] = text

    def _publish(self, values: Mapping[str, ConfigValue]) -> None:
        for name, value in values.items():
            setattr(self, BROKER_KEYS[name].attribute, value)
        names = self._assignor_names
        self.consumer_assignors = [names.get(name, name) for name in self.group_consumer_assignors]

    @property
    def passes_logins(self) -> bool:
        """Whether the upstream decides about the logins of clients."""
        return self.kcoord_upstream_authentication == PASS_THROUGH

    @property
    def own_assignors(self) -> list[str]:
        """The entries of group.consumer.assignors that are not built in: references to classes and entry points."""
        return [name for name in self.group_consumer_assignors if name not in KNOWN_CONSUMER_ASSIGNORS]

    def name_assignor(self, reference: str, name: str) -> None:
        """Notes the name of an assignor of one's own, which only the loaded class knows."""
        self._assignor_names[reference] = name
        self._publish(self._values)

    def value(self, name: str) -> ConfigValue:
        """The value in effect of any key of BROKER_KEYS."""
        return self._values[name]

    def name_for_listener(self, listener: Listener, name: str, mechanism: str | None = None) -> str:
        """Returns the key that counts for a listener, or for a SASL mechanism of a listener.

        `listener.name.LISTENER.MECHANISM.KEY` counts before `listener.name.LISTENER.KEY`, and that before KEY.
        """
        of_listener = f"listener.name.{listener.name.lower()}."
        prefixes = [of_listener] if mechanism is None else [f"{of_listener}{mechanism.lower()}.", of_listener]
        own_names = [prefix + name for prefix in prefixes]
        return next((own for own in own_names if own in self.dynamic or own in self.explicit), name)

    def value_for_listener(self, listener: Listener, name: str, mechanism: str | None = None) -> ConfigValue:
        """Returns the value of a key of BROKER_KEYS that counts for a listener, or for a mechanism of a listener."""
        own_name = self.name_for_listener(listener, name, mechanism)
        if own_name == name:
            return self._values[name]
        return BROKER_KEYS[name].parse(self.dynamic.get(own_name, self.explicit.get(own_name)))

    def sasl_mechanisms(self, listener: Listener) -> list[str]:
        """Returns the SASL mechanisms that a listener offers, as they are configured."""
        mechanisms = self.value_for_listener(listener, "sasl.enabled.mechanisms")
        assert isinstance(mechanisms, list)
        return mechanisms

    @property
    def is_kafka_4_4(self) -> bool:
        """True if the broker behaves like Kafka 4.4, False if like 4.3."""
        return self.kcoord_release == "4.4"

    def has_key(self, key: ConfigKey) -> bool:
        """Returns whether the key exists in the release of Kafka that kcoord.release names."""
        return key.first_release <= self.kcoord_release

    @property
    def data_folders(self) -> list[str]:
        """log.dirs, or log.dir if log.dirs is not set."""
        return self.log_dir if self.log_dirs is None else self.log_dirs

    @property
    def takes_client_telemetry(self) -> bool:
        """True if clients may push metrics. As in Kafka, a receiver of metrics must be configured for that."""
        return bool(self.kcoord_client_telemetry_endpoint) or any(
            reporter != JMX_REPORTER for reporter in self.metric_reporters
        )

    def kip1327_form(self, software_name: str) -> Kip1327Form:
        """Returns the form of KIP-1327 for a client. `software_name` is empty if the client sends none."""
        return form_of(software_name, self.kcoord_kip1327_revisions) if self.kcoord_kip1327_enable else Kip1327Form.OFF

    @property
    def open_listeners(self) -> list[Listener]:
        """The listeners to bind: the entries of `listeners` that do not belong to a controller."""
        return self._client_listeners("listeners", self.listeners)

    @property
    def bootstrap_users(self) -> list[ScramUser]:
        """The users of kcoord.bootstrap.scram."""
        return parse_bootstrap_scram(self.kcoord_bootstrap_scram or "")

    @property
    def listener_principals(self) -> dict[str, str]:
        """The fixed principals of kcoord.listener.principals by the names of their listeners."""
        return parse_listener_principals(self.kcoord_listener_principals, self.open_listeners)

    @property
    def client_advertised_listeners(self) -> list[Listener]:
        """The entries of advertised.listeners, or an empty list if it is not set."""
        return self._client_listeners("advertised.listeners", self.advertised_listeners or [])

    def advertised(self, bound: Mapping[str, Listener], host_name: str) -> list[Listener]:
        """Returns the addresses that clients connect to: advertised.listeners, or `bound` if that is not set.

        `bound` has the bound listeners by name, with the ports in use. If a listener is bound on every interface,
        `host_name` replaces its host. Port 0 becomes the bound port.
        """
        if not self.advertised_listeners:
            return [
                replace(listener, host=host_name) if listener.binds_everywhere else listener
                for listener in bound.values()
            ]
        return [
            replace(listener, host=listener.host or host_name, port=listener.port or bound[listener.name].port)
            for listener in self.client_advertised_listeners
        ]

    def _client_listeners(self, key: str, entries: list[str]) -> list[Listener]:
        controllers = {name.upper() for name in self.controller_listener_names}
        protocols = parse_protocol_map(self.listener_security_protocol_map)
        for name in controllers:
            protocols.setdefault(name, protocols.get("PLAINTEXT", SecurityProtocol.PLAINTEXT))
        listeners = parse_listeners(key, entries, protocols)
        return [listener for listener in listeners if listener.name not in controllers]
