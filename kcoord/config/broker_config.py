# SPDX-License-Identifier: Apache-2.0
"""BrokerConfig: one typed attribute per broker key, built from properties and changed by dynamic broker configs.

Keys that Kafka knows and this broker does not use are checked and kept, but have no annotated attribute.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from kcoord.config import checks
from kcoord.config.group_coordinator_keys import GROUP_COORDINATOR_KEYS
from kcoord.config.ignored_keys import IGNORED_KEYS
from kcoord.config.kcoord_keys import KCOORD_KEYS
from kcoord.config.key import ConfigError, ConfigKey, ConfigValue, key_table
from kcoord.config.kip1327 import Kip1327Form, form_of
from kcoord.config.listeners import Listener, SecurityProtocol, parse_listeners, parse_protocol_map
from kcoord.config.log_keys import LOG_KEYS
from kcoord.config.server_keys import JMX_REPORTER, SERVER_KEYS
from kcoord.config.transaction_keys import TRANSACTION_KEYS
from kcoord.config.unneeded_keys import UNNEEDED_KEYS

BROKER_KEYS: Mapping[str, ConfigKey] = key_table(
    GROUP_COORDINATOR_KEYS, SERVER_KEYS, LOG_KEYS, TRANSACTION_KEYS, KCOORD_KEYS, UNNEEDED_KEYS, IGNORED_KEYS
)
"""Every broker key that is known: Kafka's and kcoord's own."""

KNOWN_PREFIXES = (
    "listener.name.",
    "config.providers.",
    "rsm.config.",
    "rlmm.config.",
    "sasl.jaas.config.",
    "metrics.jmx.",
)
KNOWN_WITHOUT_DEFINITION = frozenset({"super.users", "allow.everyone.if.no.acl.found"})
"""Keys of Kafka's plug-ins, which its own key table does not have either."""


OF_ONE_WORKER = re.compile(r"kcoord\.worker\.(?P<number>\d{1,4})\.(?P<key>.+)")
"""A key for one of several workers, counted from 0: it goes before the key of all."""
OF_ALL_WORKERS = frozenset(
    {
        "broker.id",
        "group.coordinator.threads",
        "kcoord.bootstrap.features",
        "kcoord.release",
        "kcoord.worker.ports",
        "kcoord.worker.racks",
        "listeners",
        "log.dir",
        "log.dirs",
        "node.id",
        "offsets.topic.num.partitions",
        "transaction.state.log.num.partitions",
    }
)
"""Keys that the workers have to agree on, or that make them what they are."""


def is_without_effect(name: str) -> bool:
    """Whether a key is known to Kafka and changes nothing here."""
    key = BROKER_KEYS.get(name)
    if key is None:
        return name.startswith(KNOWN_PREFIXES) or name in KNOWN_WITHOUT_DEFINITION
    return not key.honoured


class BrokerConfig:
    """All broker settings in effect. Attributes are named like the keys, with `_` for `.`."""

    advertised_listeners: list[str] | None
    authorizer_class_name: str
    auto_create_topics_enable: bool
    broker_id: int
    broker_rack: str | None
    compression_gzip_level: int
    compression_lz4_level: int
    compression_type: str
    compression_zstd_level: int
    connections_max_idle_ms: int
    controller_listener_names: list[str]
    default_replication_factor: int
    delete_topic_enable: bool
    fetch_max_bytes: int
    group_consumer_assignment_interval_ms: int
    group_consumer_assignor_offload_enable: bool
    group_consumer_assignors: list[str]
    group_consumer_heartbeat_interval_ms: int
    group_consumer_max_assignment_interval_ms: int
    group_consumer_max_heartbeat_interval_ms: int
    group_consumer_max_session_timeout_ms: int
    group_consumer_max_size: int
    group_consumer_migration_policy: str
    group_consumer_min_assignment_interval_ms: int
    group_consumer_min_heartbeat_interval_ms: int
    group_consumer_min_session_timeout_ms: int
    group_consumer_regex_refresh_interval_ms: int
    group_consumer_session_timeout_ms: int
    group_coordinator_append_linger_ms: int
    group_coordinator_background_threads: int
    group_coordinator_rebalance_protocols: list[str]
    group_coordinator_threads: int
    group_initial_rebalance_delay_ms: int
    group_max_session_timeout_ms: int
    group_max_size: int
    group_min_session_timeout_ms: int
    kcoord_assignor_inline_ms: int
    kcoord_bootstrap_features: list[str]
    kcoord_client_telemetry_endpoint: str
    kcoord_kip1327_enable: bool
    kcoord_kip1327_revisions: list[str]
    kcoord_log_flush_policy: str
    kcoord_fast_paths_enable: bool
    kcoord_metadata_cache_enable: bool
    kcoord_metrics_host: str
    kcoord_metrics_port: int
    kcoord_max_id_bytes: int
    kcoord_offsets_expiration_policy: str
    kcoord_partition_max_groups: int
    kcoord_release: str
    kcoord_request_max_bytes: int
    kcoord_response_buffer_max_bytes: int
    kcoord_worker_ports: list[str]
    kcoord_worker_racks: list[str]
    listener_security_protocol_map: str
    listeners: list[str]
    log_cleaner_backoff_ms: int
    log_cleaner_dedupe_buffer_size: int
    log_cleaner_delete_retention_ms: int
    log_cleaner_enable: bool
    log_cleaner_io_max_bytes_per_second: float
    log_cleaner_max_compaction_lag_ms: int
    log_cleaner_min_cleanable_ratio: float
    log_cleaner_min_compaction_lag_ms: int
    log_cleanup_policy: list[str]
    log_dir: list[str]
    log_dirs: list[str] | None
    log_flush_interval_messages: int
    log_flush_interval_ms: int | None
    log_flush_offset_checkpoint_interval_ms: int
    log_flush_scheduler_interval_ms: int
    log_flush_start_offset_checkpoint_interval_ms: int
    log_index_interval_bytes: int
    log_index_size_max_bytes: int
    log_message_timestamp_after_max_ms: int
    log_message_timestamp_before_max_ms: int
    log_message_timestamp_type: str
    log_retention_bytes: int
    log_retention_check_interval_ms: int
    log_retention_hours: int
    log_retention_minutes: int | None
    log_retention_ms: int | None
    log_roll_hours: int
    log_roll_jitter_hours: int
    log_roll_jitter_ms: int | None
    log_roll_ms: int | None
    log_segment_bytes: int
    log_segment_delete_delay_ms: int
    max_connection_creation_rate: int
    max_connections: int
    max_connections_per_ip: int
    max_connections_per_ip_overrides: str
    max_decompressed_message_bytes: int
    max_incremental_fetch_session_cache_slots: int
    max_request_partition_size_limit: int
    message_max_bytes: int
    metadata_log_segment_bytes: int
    metric_reporters: list[str]
    min_insync_replicas: int
    node_id: int
    num_partitions: int
    offset_metadata_max_bytes: int
    offsets_commit_timeout_ms: int
    offsets_retention_check_interval_ms: int
    offsets_retention_minutes: int
    offsets_topic_compression_codec: int
    offsets_topic_num_partitions: int
    offsets_topic_replication_factor: int
    offsets_topic_segment_bytes: int
    principal_builder_class: str
    producer_id_expiration_check_interval_ms: int
    producer_id_expiration_ms: int
    quota_window_num: int
    quota_window_size_seconds: int
    socket_listen_backlog_size: int
    socket_receive_buffer_bytes: int
    socket_request_max_bytes: int
    socket_send_buffer_bytes: int
    telemetry_max_bytes: int
    transaction_max_timeout_ms: int
    transaction_partition_verification_enable: bool
    transaction_remove_expired_transaction_cleanup_interval_ms: int
    transaction_state_log_num_partitions: int
    transaction_state_log_replication_factor: int
    transaction_state_log_segment_bytes: int
    transactional_id_expiration_ms: int
    unstable_api_versions_enable: bool

    def __init__(self, explicit: Mapping[str, str]) -> None:
        """Use `from_properties`, which also makes the cross-field checks."""
        self.explicit: Mapping[str, str] = dict(explicit)
        """What was set, as text."""
        self.dynamic: Mapping[str, str] = {}
        """Dynamic broker configs in effect, as text."""
        self.ignored: list[str] = []
        """Keys that were set, are known to Kafka and change nothing here."""
        self.unknown: list[str] = []
        """Keys that were set and that nobody knows."""
        self.of_workers: dict[int, dict[str, str]] = {}
        """What was set for single workers (`kcoord.worker.N.KEY`), by their numbers from 0."""
        self.consumer_assignors: list[str] = []
        """group.consumer.assignors by the assignors' own names, which members and records use."""
        self._static: dict[str, ConfigValue] = {name: key.default for name, key in BROKER_KEYS.items()}
        for name, text in explicit.items():
            self._set_static(name, text)
        if "node.id" not in explicit and "broker.id" in explicit:
            self._static["node.id"] = self._static["broker.id"]
        self._values = self._static
        self._publish(self._static)

    @classmethod
    def from_properties(cls, properties: Mapping[str, str]) -> BrokerConfig:
        """Parse and check settings; ConfigError names key, value and what is allowed."""
        config = cls(properties)
        checks.check_broker_config(config)
        return config

    def _set_static(self, name: str, text: str) -> None:
        of_worker = OF_ONE_WORKER.fullmatch(name)
        if of_worker is not None:
            self._set_for_worker(int(of_worker["number"]), of_worker["key"], text)
            return
        if name in BROKER_KEYS:
            self._static[name] = BROKER_KEYS[name].parse(text)
        elif not is_without_effect(name):
            self.unknown.append(name)
        if is_without_effect(name):
            self.ignored.append(name)

    def _set_for_worker(self, number: int, name: str, text: str) -> None:
        key = BROKER_KEYS.get(name)
        if key is None or name in OF_ALL_WORKERS:
            reason = "there is no such key" if key is None else "it is the same for all workers"
            raise ConfigError(f"{name} cannot be set for worker {number}: {reason}")
        key.parse(text)
        self.of_workers.setdefault(number, {})[name] = text

    def _publish(self, values: Mapping[str, ConfigValue]) -> None:
        for name, value in values.items():
            setattr(self, BROKER_KEYS[name].attribute, value)
        names = checks.KNOWN_CONSUMER_ASSIGNORS
        self.consumer_assignors = [names.get(name, name) for name in self.group_consumer_assignors]

    def value(self, name: str) -> ConfigValue:
        """The value in effect of any key of BROKER_KEYS."""
        return self._values[name]

    def static_value(self, name: str) -> ConfigValue:
        """The value without dynamic broker configs."""
        return self._static[name]

    def with_dynamic(self, overrides: Mapping[str, str]) -> BrokerConfig:
        """A checked copy with other dynamic broker configs; ConfigError where they cannot be used."""
        copy = BrokerConfig(self.explicit)
        copy._values = copy._static | {
            name: BROKER_KEYS[name].parse(text) for name, text in overrides.items() if name in BROKER_KEYS
        }
        copy.dynamic = dict(overrides)
        copy._publish(copy._values)
        checks.check_broker_config(copy)
        return copy

    def apply_dynamic(self, overrides: Mapping[str, str]) -> None:
        """Make `overrides` the dynamic broker configs in effect; a key that is no longer among them is static again.

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

    @property
    def is_kafka_4_4(self) -> bool:
        """True if the broker behaves like Kafka 4.4, false if like 4.3."""
        return self.kcoord_release == "4.4"

    def has_key(self, key: ConfigKey) -> bool:
        """True if the release of Kafka that the broker behaves like has the key."""
        return key.first_release <= self.kcoord_release

    @property
    def data_folders(self) -> list[str]:
        """log.dirs, or log.dir where that is not set."""
        return self.log_dirs or self.log_dir

    @property
    def takes_client_telemetry(self) -> bool:
        """Whether clients may push metrics: where something is named that takes them, as in Kafka."""
        return bool(self.kcoord_client_telemetry_endpoint) or any(one != JMX_REPORTER for one in self.metric_reporters)

    def kip1327_form(self, software_name: str) -> Kip1327Form:
        """The form of KIP-1327 for a client whose software has this name; empty if the client gives none."""
        return form_of(software_name, self.kcoord_kip1327_revisions) if self.kcoord_kip1327_enable else Kip1327Form.OFF

    @property
    def open_listeners(self) -> list[Listener]:
        """The listeners to bind: those of `listeners` that belong to no controller."""
        return self._client_listeners("listeners", self.listeners)

    @property
    def client_advertised_listeners(self) -> list[Listener]:
        """The entries of advertised.listeners, none where it is not set."""
        return self._client_listeners("advertised.listeners", self.advertised_listeners or [])

    def advertised(self, bound: Mapping[str, Listener], host_name: str) -> list[Listener]:
        """What clients are told: advertised.listeners, or `bound` (by name, with the ports really in use).

        Where a bound listener is on every interface, `host_name` replaces its host; port 0 becomes the bound port.
        """
        if not self.advertised_listeners:
            return [
                Listener(one.name, host_name if one.binds_everywhere else one.host, one.port, one.security_protocol)
                for one in bound.values()
            ]
        return [
            Listener(one.name, one.host or host_name, one.port or bound[one.name].port, one.security_protocol)
            for one in self.client_advertised_listeners
        ]

    def _client_listeners(self, key: str, entries: list[str]) -> list[Listener]:
        controllers = {name.upper() for name in self.controller_listener_names}
        protocols = parse_protocol_map(self.listener_security_protocol_map)
        for name in controllers:
            protocols.setdefault(name, protocols.get("PLAINTEXT", SecurityProtocol.PLAINTEXT))
        return [one for one in parse_listeners(key, entries, protocols) if one.name not in controllers]
