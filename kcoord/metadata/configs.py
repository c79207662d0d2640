# SPDX-License-Identifier: Apache-2.0
"""IncrementalAlterConfigs and AlterConfigs as pure functions of the image. Each resource succeeds or fails as a whole.

BROKER_LOGGER resources are not in the metadata log. The server handles them before it calls these functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Final, TypeAlias, TypeVar

from kcoord.config import (
    BROKER_KEYS,
    GROUP_KEYS,
    TOPIC_KEYS,
    BrokerConfig,
    ConfigError,
    ConfigKey,
    ConfigType,
    UpdateMode,
    check_group_configs,
    check_topic_configs,
    value_to_string,
)
from kcoord.config.checks import check_thread_counts
from kcoord.config.keys import broker_key, is_for_one_broker
from kcoord.config.topic_config import topic_default
from kcoord.metadata import image as image_module
from kcoord.metadata import records
from kcoord.metadata.client_metrics import check_client_metrics_configs
from kcoord.metadata.collect import duplicates
from kcoord.metadata.image import (
    BROKER_RESOURCE,
    CLIENT_METRICS_RESOURCE,
    GROUP_RESOURCE,
    TOPIC_RESOURCE,
    MetadataImage,
)
from kcoord.metadata.names import check_node_id, check_topic_name
from kcoord.runtime.result import CoordinatorRecord, CoordinatorResult
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import AlterConfigsResponse, IncrementalAlterConfigsResponse

if TYPE_CHECKING:
    from kcoord_protocol.messages import AlterConfigsRequest, IncrementalAlterConfigsRequest

T = TypeVar("T")

Change: TypeAlias = tuple[str, int, str | None]
"""Key, operation and value."""

ALL_BROKERS: Final = ""


class AlterOperation(IntEnum):
    """The operations of IncrementalAlterConfigs, with their codes on the wire (KIP-339)."""

    SET = 0
    DELETE = 1
    APPEND = 2
    SUBTRACT = 3


def incremental_alter_configs(
    image: MetadataImage, config: BrokerConfig, request: IncrementalAlterConfigsRequest
) -> CoordinatorResult[IncrementalAlterConfigsResponse]:
    """Changes the keys that the request names. All other keys keep their values."""
    result = CoordinatorResult(IncrementalAlterConfigsResponse())
    repeated = duplicates((resource.resource_type, resource.resource_name) for resource in request.resources)
    for resource in request.resources:
        kind, name = resource.resource_type, resource.resource_name
        changes = [(entry.name, entry.config_operation, entry.value) for entry in resource.configs]
        answer = IncrementalAlterConfigsResponse.AlterConfigsResourceResponse(
            error_message=None, resource_type=kind, resource_name=name
        )
        try:
            _check_request((kind, name) in repeated, changes)
            _check_resource(image, config, kind, name)
            old = image.configs.get((kind, name), {})
            altered = _altered(image, config, kind, name, _apply(config, kind, old, changes), changes)
            _check_topic_exists(image, kind, name)
            result.records += altered
        except KafkaError as error:
            answer.error_code, answer.error_message = error.error, error.message
        result.response.responses.append(answer)
    return _unless_validating(result, request.validate_only)


def alter_configs(
    image: MetadataImage, config: BrokerConfig, request: AlterConfigsRequest
) -> CoordinatorResult[AlterConfigsResponse]:
    """Replaces all configs of a resource by those of the request."""
    result = CoordinatorResult(AlterConfigsResponse())
    repeated = duplicates((resource.resource_type, resource.resource_name) for resource in request.resources)
    for resource in request.resources:
        kind, name = resource.resource_type, resource.resource_name
        changes: list[Change] = [(entry.name, AlterOperation.SET, entry.value) for entry in resource.configs]
        answer = AlterConfigsResponse.AlterConfigsResourceResponse(
            error_message=None, resource_type=kind, resource_name=name
        )
        try:
            _check_request((kind, name) in repeated, changes)
            _check_resource(image, config, kind, name)
            altered = _altered(image, config, kind, name, _apply(config, kind, {}, changes), changes)
            _check_topic_exists(image, kind, name)
            result.records += altered
        except KafkaError as error:
            answer.error_code, answer.error_message = error.error, error.message
        result.response.responses.append(answer)
    return _unless_validating(result, request.validate_only)


def _unless_validating(result: CoordinatorResult[T], validate_only: bool) -> CoordinatorResult[T]:
    if validate_only:
        result.records.clear()
    return result


def _check_request(is_repeated: bool, changes: Sequence[Change]) -> None:
    if is_repeated:
        raise KafkaError(Errors.INVALID_REQUEST, "Each resource must appear at most once.")
    if duplicates(name for name, _, _ in changes):
        raise KafkaError(Errors.INVALID_REQUEST, "Error due to duplicate config keys")
    for name, operation, value in changes:
        if operation not in AlterOperation.__members__.values():
            raise KafkaError(Errors.INVALID_REQUEST, f"Unknown operations type {operation}")
        if value is None and operation != AlterOperation.DELETE:
            raise KafkaError(Errors.INVALID_REQUEST, f"Null value not supported for : {name}")


def _check_resource(image: MetadataImage, config: BrokerConfig, kind: int, name: str) -> None:
    match kind:
        case image_module.TOPIC_RESOURCE if not name:
            raise KafkaError(Errors.INVALID_REQUEST, "Default topic resources are not allowed.")
        case image_module.TOPIC_RESOURCE:
            check_topic_name(name)
        case image_module.BROKER_RESOURCE:
            _check_broker_name(image, config, name)
        case image_module.CLIENT_METRICS_RESOURCE if not name:
            raise KafkaError(Errors.INVALID_REQUEST, "Subscription name can't be empty")
        case image_module.GROUP_RESOURCE if not name:
            raise KafkaError(Errors.INVALID_REQUEST, "Default group resources are not allowed.")
        case image_module.CLIENT_METRICS_RESOURCE | image_module.GROUP_RESOURCE:
            return
        case _:
            raise KafkaError(Errors.INVALID_REQUEST, f"Unknown resource type {kind}")


def _check_topic_exists(image: MetadataImage, kind: int, name: str) -> None:
    """Raises KafkaError if the topic does not exist. Kafka, too, checks this after the configs."""
    if kind == TOPIC_RESOURCE and name not in image.topics:
        raise KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION, f"The topic '{name}' does not exist.")


def _check_broker_name(image: MetadataImage, config: BrokerConfig, name: str) -> None:
    if name == ALL_BROKERS:
        return
    check_node_id(name, "Node id")
    # A name with leading zeros would be stored, and no broker would read its configs.
    if name not in map(str, (config.node_id, *image.brokers)):
        raise KafkaError(
            Errors.INVALID_REQUEST, f"Unexpected broker id, expected {config.node_id}, but received {name}"
        )


def _apply(config: BrokerConfig, kind: int, old: Mapping[str, str], changes: Sequence[Change]) -> dict[str, str]:
    """Returns the configs of the resource after the changes."""
    new = dict(old)
    for name, operation, value in changes:
        if operation == AlterOperation.DELETE:
            new.pop(name, None)
        elif operation == AlterOperation.SET:
            assert value is not None
            new[name] = value
        else:
            assert value is not None
            new[name] = _changed_list(config, kind, name, old.get(name), AlterOperation(operation), value)
    return new


def _changed_list(
    config: BrokerConfig, kind: int, name: str, old: str | None, operation: AlterOperation, value: str
) -> str:
    key = _keys_of(kind).get(name)
    if key is None or key.type is not ConfigType.LIST:
        text = f"Can't {operation.name} to key {name} because its type is not LIST."
        if kind == image_module.BROKER_RESOURCE:
            text = f"Config value {operation.name.lower()} is not allowed for config key: {name}"
        raise KafkaError(Errors.INVALID_CONFIG, text)
    entries = _entries(_default(config, kind, key) if old is None else old)
    given = _entries(value)
    if operation is AlterOperation.APPEND:
        entries += [entry for entry in dict.fromkeys(given) if entry not in entries]
    else:
        entries = [entry for entry in entries if entry not in given]
    return ",".join(entries)


def _keys_of(kind: int) -> Mapping[str, ConfigKey]:
    return {TOPIC_RESOURCE: TOPIC_KEYS, BROKER_RESOURCE: BROKER_KEYS, GROUP_RESOURCE: GROUP_KEYS}.get(kind, {})


def _default(config: BrokerConfig, kind: int, key: ConfigKey) -> str:
    """Returns the value of a list key that the resource does not set."""
    if kind == TOPIC_RESOURCE:
        return value_to_string(topic_default(config, key.name)) or ""
    if kind == BROKER_RESOURCE:
        return value_to_string(config.value(key.name)) or ""
    return value_to_string(key.default) or ""


def _entries(text: str) -> list[str]:
    return [entry.strip() for entry in text.split(",") if entry.strip()]


def _altered(
    image: MetadataImage,
    config: BrokerConfig,
    kind: int,
    name: str,
    new: Mapping[str, str],
    changes: Sequence[Change],
) -> list[CoordinatorRecord]:
    """Checks the new configs of a resource; returns the records for the keys that change."""
    try:
        if kind == TOPIC_RESOURCE:
            check_topic_configs(config, new)
        elif kind == GROUP_RESOURCE:
            check_group_configs(config, new)
        elif kind == CLIENT_METRICS_RESOURCE:
            check_client_metrics_configs(new)
        else:
            changed = [key for key, operation, _ in changes if operation != AlterOperation.DELETE]
            _check_broker_configs(image, config, name, new, changed)
    except ConfigError as error:
        raise KafkaError(Errors.INVALID_CONFIG, str(error)) from None
    return records.new_config_records(kind, name, image.configs.get((kind, name), {}), new)


def _check_broker_configs(
    image: MetadataImage, config: BrokerConfig, name: str, new: Mapping[str, str], changed: Sequence[str]
) -> None:
    """Raises INVALID_REQUEST for any error in a dynamic broker config (observed in Kafka 4.3.1)."""
    _check_update_modes(name, changed)
    other_configs = image.broker_configs() if name != ALL_BROKERS else image.broker_configs(config.node_id)
    old = image.broker_configs(name)
    if name == ALL_BROKERS:
        effective_before, effective = {**old, **other_configs}, {**new, **other_configs}
    else:
        effective_before, effective = {**other_configs, **old}, {**other_configs, **new}
    try:
        for key_name, text in new.items():
            key = broker_key(key_name)
            if key is not None:
                key.parse(text)
        changed_config = config.with_dynamic(effective)
        check_thread_counts(config.with_dynamic(config.usable(effective_before)), changed_config)
        for check in config.further_checks:
            check(changed_config)
    except ConfigError as error:
        raise KafkaError(Errors.INVALID_REQUEST, str(error)) from None


def _check_update_modes(broker_name: str, changed: Sequence[str]) -> None:
    """Raises KafkaError for keys that cannot be changed while a broker runs, or not for all brokers.

    The texts are those of Kafka 4.3.1.
    """
    keys = [key for name in changed if (key := BROKER_KEYS.get(name)) is not None]
    _refuse("Cannot update these configs dynamically", [key.name for key in keys if not key.dynamic])
    _refuse(
        "These security configs can be dynamically updated only per-listener using the listener prefix",
        [key.name for key in keys if key.name.startswith("ssl.")],
    )
    if broker_name == ALL_BROKERS:
        of_one_broker = [key.name for key in keys if key.update_mode is UpdateMode.PER_BROKER]
        of_one_broker += [name for name in changed if is_for_one_broker(name)]
        _refuse("Cannot update these configs at default cluster level, broker id must be specified", of_one_broker)


def _refuse(reason: str, names: Sequence[str]) -> None:
    if names:
        raise KafkaError(Errors.INVALID_REQUEST, f"{reason}: [{', '.join(sorted(names))}]")
