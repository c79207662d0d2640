# SPDX-License-Identifier: Apache-2.0
"""Client settings, with Kafka's names in snake_case and Kafka's defaults. The constructors check the values.

Each kind of client has a dataclass with the names, types and defaults of its settings. A TypedDict of the same names
gives the constructors of the clients typed keyword arguments.
"""

from __future__ import annotations

import logging
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final, Literal, Self, TypedDict, TypeVar, Union, get_args, get_origin, get_type_hints

from kcoord.client.api_versions import Kip1327Revision
from kcoord.client.assignors.loading import LocalAssignor
from kcoord.client.errors import ConfigException
from kcoord.client.kafka_properties import translate
from kcoord.client.reset_policy import TO_START_TIME, ResetPolicy, parse_reset_policy
from kcoord.client.security import Security
from kcoord.client.version import SOFTWARE_NAME

GroupProtocol = Literal["consumer", "classic"]
IsolationLevel = Literal["read_uncommitted", "read_committed"]
CompressionType = Literal["none", "gzip", "snappy", "lz4", "zstd"]
Acks = Literal[0, 1, -1, "all"]

BATCH_SIZE_LIMIT: Final = 1 << 30

_MOST_SHORT: Final = (1 << 15) - 1
_MOST_INT: Final = (1 << 31) - 1
_MOST_LONG: Final = (1 << 63) - 1
_LONGS: Final = frozenset(
    {
        "buffer_memory",
        "linger_ms",
        "max_block_ms",
        "metadata_max_age_ms",
        "reconnect_backoff_max_ms",
        "reconnect_backoff_ms",
        "retry_backoff_max_ms",
        "retry_backoff_ms",
        "socket_connection_setup_timeout_ms",
    }
)
_SOFTWARE_NAME: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
_logger = logging.getLogger(__name__)


class CommonOptions(TypedDict, total=False):
    """Keyword arguments of every client."""

    bootstrap_servers: str | Sequence[str]
    client_id: str
    client_software_name: str
    kip_1327_revision: Kip1327Revision
    request_timeout_ms: int
    default_api_timeout_ms: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    reconnect_backoff_ms: int
    reconnect_backoff_max_ms: int
    socket_connection_setup_timeout_ms: int
    metadata_max_age_ms: int
    receive_message_max_bytes: int
    security: Security | None


class AdminOptions(CommonOptions, total=False):
    """Keyword arguments of AdminClient."""


class ProducerOptions(CommonOptions, total=False):
    """Keyword arguments of Producer."""

    acks: Acks
    enable_idempotence: bool
    compression_type: CompressionType
    linger_ms: int
    batch_size: int
    buffer_memory: int
    max_block_ms: int
    max_request_size: int
    delivery_timeout_ms: int
    partitioner_ignore_keys: bool
    transactional_id: str | None
    transaction_timeout_ms: int


class ConsumerOptions(CommonOptions, total=False):
    """Keyword arguments of Consumer."""

    group_id: str | None
    group_protocol: GroupProtocol
    group_instance_id: str | None
    group_remote_assignor: str | None
    group_local_assignors: str | Sequence[LocalAssignor]
    client_rack: str
    auto_offset_reset: str
    auto_offset_reset_new_partitions: str | None
    enable_auto_commit: bool
    auto_commit_interval_ms: int
    isolation_level: IsolationLevel
    check_crcs: bool
    fetch_min_bytes: int
    fetch_max_bytes: int
    fetch_max_wait_ms: int
    max_partition_fetch_bytes: int
    max_poll_records: int
    max_poll_interval_ms: int
    allow_auto_create_topics: bool


def _at_least(lowest: int, config: object, *names: str) -> None:
    """Checks whole numbers. The greatest one is that of the setting's type in Kafka."""
    for name in names:
        value = getattr(config, name)
        highest = _MOST_LONG if name in _LONGS else _MOST_INT
        if isinstance(value, bool) or not isinstance(value, int) or not lowest <= value <= highest:
            raise ConfigException(f"{name}: {value!r} is not a whole number from {lowest} to {highest}")


def _utf8_bytes(text: str) -> int:
    """Returns the size of a text, -1 if it has half a surrogate pair."""
    try:
        return len(text.encode())
    except UnicodeEncodeError:
        return -1


def _one_of(config: object, name: str, allowed: Sequence[object]) -> None:
    value = getattr(config, name)
    if value not in allowed:
        raise ConfigException(f"{name}: {value!r} is not one of {', '.join(map(str, allowed))}")


@dataclass(kw_only=True)
class CommonConfig:
    """Settings of every client."""

    bootstrap_servers: str | Sequence[str] = ()
    client_id: str = "kcoord-client"
    client_software_name: str = SOFTWARE_NAME
    kip_1327_revision: Kip1327Revision = "creation-time"
    request_timeout_ms: int = 30_000
    default_api_timeout_ms: int = 60_000
    retry_backoff_ms: int = 100
    retry_backoff_max_ms: int = 1_000
    reconnect_backoff_ms: int = 50
    reconnect_backoff_max_ms: int = 1_000
    socket_connection_setup_timeout_ms: int = 10_000
    metadata_max_age_ms: int = 300_000
    receive_message_max_bytes: int = 256 << 20
    security: Security | None = None

    def __post_init__(self) -> None:
        self.bootstrap_addresses = parse_addresses(self.bootstrap_servers)
        if not _SOFTWARE_NAME.fullmatch(self.client_software_name):
            raise ConfigException(
                f"client_software_name: {self.client_software_name!r} is not made of letters, digits, '-' and '.', "
                "with a letter or digit first and last (KIP-511)"
            )
        if not 0 <= _utf8_bytes(self.client_id) <= _MOST_SHORT:
            raise ConfigException(f"client_id: must have at most {_MOST_SHORT} bytes of UTF-8")
        _one_of(self, "kip_1327_revision", get_args(Kip1327Revision))
        _at_least(0, self, "retry_backoff_ms", "retry_backoff_max_ms", "reconnect_backoff_ms")
        _at_least(0, self, "reconnect_backoff_max_ms", "metadata_max_age_ms")
        _at_least(1, self, "request_timeout_ms", "default_api_timeout_ms", "socket_connection_setup_timeout_ms")
        _at_least(1, self, "receive_message_max_bytes")

    def settings(self) -> dict[str, object]:
        """Returns the settings by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_properties(cls, properties: Mapping[str, str], warn: Callable[[str], None] = _logger.warning) -> Self:
        """Reads properties in Kafka's spelling, as in the files of its tools: `{"bootstrap.servers": "host:9092"}`.

        Calls `warn` with a sentence for each property that has no effect here. Raises ConfigException for an invalid
        value, and for security settings that this client does not support.
        """
        hints = get_type_hints(cls)
        names = {field.name.replace("_", "."): field.name for field in fields(cls) if field.name != "security"}
        settings, security, notes = translate(properties, names.keys())
        for note in notes:
            warn(note)
        values: dict[str, Any] = {
            names[key]: _from_text(key, text, hints[names[key]]) for key, text in settings.items()
        }
        try:
            return cls(**values, security=security)
        except ConfigException as error:
            # The checks name settings as keyword arguments. In quotes are values.
            setting = rf"\b(?<!')({'|'.join(names.values())})\b"
            text = re.sub(setting, lambda match: match[0].replace("_", "."), str(error))
            raise ConfigException(text) from None


@dataclass(kw_only=True)
class AdminConfig(CommonConfig):
    """Settings of AdminClient."""


@dataclass(kw_only=True)
class ProducerConfig(CommonConfig):
    """Settings of Producer."""

    acks: Acks = "all"
    enable_idempotence: bool = True
    compression_type: CompressionType = "none"
    linger_ms: int = 5
    batch_size: int = 16_384
    buffer_memory: int = 32 << 20
    max_block_ms: int = 60_000
    max_request_size: int = 1 << 20
    delivery_timeout_ms: int = 120_000
    partitioner_ignore_keys: bool = False
    transactional_id: str | None = None
    transaction_timeout_ms: int = 60_000

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of(self, "acks", (0, 1, -1, "all"))
        _one_of(self, "compression_type", get_args(CompressionType))
        _at_least(0, self, "linger_ms", "batch_size", "max_block_ms", "max_request_size")
        _at_least(1, self, "buffer_memory", "delivery_timeout_ms", "transaction_timeout_ms")
        if self.batch_size > BATCH_SIZE_LIMIT:
            raise ConfigException(f"batch_size: {self.batch_size} must be at most {BATCH_SIZE_LIMIT}")
        if self.delivery_timeout_ms < self.linger_ms + self.request_timeout_ms:
            raise ConfigException(
                f"delivery_timeout_ms: {self.delivery_timeout_ms} must be at least linger_ms + request_timeout_ms "
                f"({self.linger_ms + self.request_timeout_ms})"
            )
        if self.enable_idempotence and self.required_acks != -1:
            raise ConfigException(f"acks: must be all with enable_idempotence, not {self.acks!r}")
        if self.transactional_id is not None and not self.enable_idempotence:
            raise ConfigException("enable_idempotence: must be true with a transactional_id")
        if self.transactional_id == "":
            raise ConfigException("transactional_id: must not be empty")

    @property
    def required_acks(self) -> int:
        """The value of `acks` in requests: -1 stands for all."""
        return -1 if self.acks == "all" else self.acks


@dataclass(kw_only=True)
class ConsumerConfig(CommonConfig):
    """Settings of Consumer."""

    group_id: str | None = None
    group_protocol: GroupProtocol = "consumer"
    group_instance_id: str | None = None
    group_remote_assignor: str | None = None
    group_local_assignors: str | Sequence[LocalAssignor] = ()
    client_rack: str = ""
    auto_offset_reset: str = "latest"
    auto_offset_reset_new_partitions: str | None = None
    enable_auto_commit: bool = True
    auto_commit_interval_ms: int = 5_000
    isolation_level: IsolationLevel = "read_uncommitted"
    check_crcs: bool = True
    fetch_min_bytes: int = 1
    fetch_max_bytes: int = 52_428_800
    fetch_max_wait_ms: int = 500
    max_partition_fetch_bytes: int = 1 << 20
    max_poll_records: int = 500
    max_poll_interval_ms: int = 300_000
    allow_auto_create_topics: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _one_of(self, "group_protocol", get_args(GroupProtocol))
        _one_of(self, "isolation_level", get_args(IsolationLevel))
        _at_least(0, self, "auto_commit_interval_ms", "fetch_min_bytes", "fetch_max_bytes", "fetch_max_wait_ms")
        _at_least(0, self, "max_partition_fetch_bytes")
        _at_least(1, self, "max_poll_records", "max_poll_interval_ms")
        for name in ("group_id", "group_instance_id", "group_remote_assignor"):
            value = getattr(self, name)
            if value is not None and not value.strip():
                raise ConfigException(f"{name}: must not be blank")
        if self.group_local_assignors:
            self._check_local_assignors()
        self.reset_policy = parse_reset_policy("auto_offset_reset", self.auto_offset_reset)
        if self.reset_policy is TO_START_TIME:
            if self.group_id is None:
                raise ConfigException(
                    "auto_offset_reset: to_start_time needs a group_id: it uses the creation time of the group"
                )
            if self.kip_1327_revision == "new-partitions":
                raise ConfigException(
                    "auto_offset_reset: to_start_time needs the creation time of the group, which "
                    "kip_1327_revision new-partitions does not have"
                )
        self.new_partitions_policy = self._new_partitions_policy()
        if self.group_protocol == "classic":
            raise ConfigException("group_protocol: this client supports the consumer protocol only (KIP-848)")

    def _check_local_assignors(self) -> None:
        if self.group_remote_assignor is not None:
            raise ConfigException(
                "group_local_assignors: cannot be used together with group_remote_assignor (KIP-848): "
                f"{self.group_remote_assignor!r} runs in the broker"
            )
        if self.kip_1327_revision == "new-partitions":
            raise ConfigException(
                "group_local_assignors: cannot be used with kip_1327_revision new-partitions, whose responses to "
                "heartbeats have no fields for local assignors"
            )

    def _new_partitions_policy(self) -> ResetPolicy | None:
        """Returns the policy for new partitions (KIP-1327): None, or any policy but none and to_start_time.

        The option requires the consumer protocol, because classic groups have no creation time.
        """
        text = self.auto_offset_reset_new_partitions
        if text is None:
            return None
        if self.group_protocol == "classic":
            raise ConfigException("auto_offset_reset_new_partitions: requires group_protocol consumer (KIP-1327)")
        policy = parse_reset_policy("auto_offset_reset_new_partitions", text, none_allowed=False)
        if policy is TO_START_TIME:
            raise ConfigException("auto_offset_reset_new_partitions: to_start_time is for auto_offset_reset only")
        return policy


_Config = TypeVar("_Config", bound=CommonConfig)


def make_config(cls: type[_Config], config: _Config | None, options: Mapping[str, Any]) -> _Config:
    """Returns `config`, or a config made of keyword arguments. Raises ConfigException if both are given."""
    if config is not None:
        if options:
            raise ConfigException("pass either a config or keyword arguments, not both")
        return config
    unknown = sorted(options.keys() - {field.name for field in fields(cls)})
    if unknown:
        raise ConfigException(f"{unknown[0]}: unknown setting; the settings are the fields of {cls.__name__}")
    return cls(**options)


def parse_addresses(servers: str | Sequence[str]) -> list[tuple[str, int]]:
    """Parses `host:port` addresses from a list or a comma-separated text. IPv6 hosts are in brackets.

    `PLAINTEXT://host:port` is accepted, too: Java's clients also ignore the protocol of an address.
    """
    texts = servers.split(",") if isinstance(servers, str) else servers
    addresses = [_parse_address(text.strip()) for text in texts if text.strip()]
    if not addresses:
        raise ConfigException("bootstrap_servers: must have at least one host:port")
    return addresses


def _parse_address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition("://")[2].rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigException(f"bootstrap_servers: {text!r} is not host:port")
    return host, int(port)


def _from_text(key: str, text: str, hint: object) -> object:
    """Converts the text of a property to the type of its setting, which is `hint`."""
    choices = [hint]
    if get_origin(hint) in (Union, types.UnionType):
        choices = list(get_args(hint))
    if int in choices or int in {type(choice) for choice in get_args(hint) if get_origin(hint) is Literal}:
        if re.fullmatch(r"[+-]?[0-9]{1,19}", text):
            return int(text)
        if int in choices:
            raise ConfigException(f"{key}: {text!r} is not a whole number")
    if bool in choices:
        if text.lower() not in ("true", "false"):
            raise ConfigException(f"{key}: {text!r} is neither true nor false")
        return text.lower() == "true"
    return text
