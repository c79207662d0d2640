# SPDX-License-Identifier: Apache-2.0
"""Client telemetry (KIP-714): which client instance is to push which metrics how often, and what it pushes.

Subscriptions are configs in the metadata image; the instances are known to the broker that they speak to, and to no
log. What was pushed goes to a receiver once it is known to be metrics at all.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kcoord.config import BrokerConfig
from kcoord.metadata.client_metrics import DEFAULT_INTERVAL_MS, MetricsSubscription, subscriptions_of
from kcoord.metadata.image import MetadataImage
from kcoord_protocol.batch_header import crc32c
from kcoord_protocol.compression import Compression, decompress
from kcoord_protocol.errors import BatchTooLargeError, CorruptBatchError, Errors, KafkaError
from kcoord_protocol.messages import (
    GetTelemetrySubscriptionsRequest,
    GetTelemetrySubscriptionsResponse,
    PushTelemetryRequest,
    PushTelemetryResponse,
)
from kcoord_protocol.uuid import ZERO_UUID, uuid_to_string

MOST_INSTANCES: Final = 16_384
"""Client instances that are remembered; the one that was quiet for longest goes first, as in Kafka."""
SHORTEST_MEMORY_MS: Final = 60_000
MEMORY_INTERVALS: Final = 3
"""An instance is forgotten when it was quiet for so many of its push intervals, or for a minute if that is more."""
ACCEPTED_COMPRESSION: Final = (Compression.ZSTD, Compression.LZ4, Compression.GZIP, Compression.SNAPPY)
ALL_METRICS: Final = "*"
EXPANSION: Final = 16
"""What is pushed may be so many times as large when it is decompressed."""
RESERVED_IDS: Final = frozenset((ZERO_UUID, bytes(15) + b"\x01"))

Receiver = Callable[[bytes], None]
"""Takes metrics in OpenTelemetry's protobuf format MetricsData."""


@dataclass(slots=True)
class ClientFacts:
    """What a connection knows about its client. `instance_id` is the instance that spoke on it last."""

    client_id: str = ""
    software_name: str = ""
    software_version: str = ""
    address: str = ""
    port: int = 0
    instance_id: bytes | None = None

    def attributes(self, instance_id: bytes) -> Mapping[str, str]:
        """What a subscription may match, by the names of KIP-714."""
        return {
            "client_instance_id": uuid_to_string(instance_id),
            "client_id": self.client_id,
            "client_software_name": self.software_name,
            "client_software_version": self.software_version,
            "client_source_address": self.address,
            "client_source_port": str(self.port),
        }


@dataclass(slots=True)
class _Instance:
    attributes: Mapping[str, str]
    subscriptions: Sequence[MetricsSubscription]
    """Those of the image by which the next three were found."""
    subscription_id: int
    metrics: list[str]
    interval_ms: int
    last_get_ms: int = 0
    last_push_ms: int = 0
    last_seen_ms: int = 0
    is_terminating: bool = False

    def may_get(self, now_ms: int) -> bool:
        if now_ms - max(self.last_get_ms, self.last_push_ms) < self.interval_ms:
            return False
        self.last_get_ms = now_ms
        return True

    def may_push(self, now_ms: int) -> bool:
        """The first push after a subscription was asked for may come early: clients spread theirs in time."""
        if self.last_get_ms <= self.last_push_ms and now_ms - self.last_push_ms < self.interval_ms:
            return False
        self.last_push_ms = now_ms
        return True

    @property
    def memory_ms(self) -> int:
        return max(SHORTEST_MEMORY_MS, MEMORY_INTERVALS * self.interval_ms)


class ClientTelemetry:
    """See the module's text. `new_id` makes ids of client instances."""

    def __init__(self, config: BrokerConfig, new_id: Callable[[], bytes], receive: Receiver) -> None:
        self._config = config
        self._new_id = new_id
        self._receive = receive
        self._image: MetadataImage | None = None
        self._subscriptions: Sequence[MetricsSubscription] = ()
        self._instances: OrderedDict[bytes, _Instance] = OrderedDict()

    def __len__(self) -> int:
        """How many instances are remembered."""
        return len(self._instances)

    def get_subscriptions(
        self, request: GetTelemetrySubscriptionsRequest, facts: ClientFacts, image: MetadataImage, now_ms: int
    ) -> GetTelemetrySubscriptionsResponse:
        """What the client is to push; THROTTLING_QUOTA_EXCEEDED where it asks again too early."""
        instance_id = request.client_instance_id
        if instance_id == ZERO_UUID:
            instance_id = self._fresh_id()
        instance = self._instance(instance_id, facts, image, now_ms)
        if not instance.may_get(now_ms):
            raise KafkaError(Errors.THROTTLING_QUOTA_EXCEEDED)
        return GetTelemetrySubscriptionsResponse(
            client_instance_id=instance_id,
            subscription_id=instance.subscription_id,
            accepted_compression_types=list(map(int, ACCEPTED_COMPRESSION)),
            push_interval_ms=instance.interval_ms,
            telemetry_max_bytes=self._config.telemetry_max_bytes,
            delta_temporality=True,
            requested_metrics=list(instance.metrics),
        )

    def push(
        self, request: PushTelemetryRequest, facts: ClientFacts, image: MetadataImage, now_ms: int
    ) -> PushTelemetryResponse:
        """Hands metrics on; KafkaError with the code of KIP-714 where they are not taken."""
        instance_id = request.client_instance_id
        if instance_id in RESERVED_IDS:
            raise KafkaError(Errors.INVALID_REQUEST)
        instance = self._instance(instance_id, facts, image, now_ms)
        try:
            self._check_push(request, instance, now_ms)
        finally:
            instance.is_terminating = request.terminating
        if request.metrics:
            self._receive(self._metrics_of(request))
        return PushTelemetryResponse()

    def disconnected(self, instance_id: bytes) -> None:
        """The connection of an instance has ended: with a new one it may ask and push at once."""
        self._instances.pop(instance_id, None)

    def _check_push(self, request: PushTelemetryRequest, instance: _Instance, now_ms: int) -> None:
        if instance.is_terminating:
            raise KafkaError(Errors.INVALID_REQUEST)
        if not instance.may_push(now_ms) and not request.terminating:
            raise KafkaError(Errors.THROTTLING_QUOTA_EXCEEDED)
        if request.subscription_id != instance.subscription_id:
            raise KafkaError(Errors.UNKNOWN_SUBSCRIPTION_ID)
        if request.compression_type not in Compression.__members__.values():
            raise KafkaError(Errors.UNSUPPORTED_COMPRESSION_TYPE)
        if len(request.metrics) > self._config.telemetry_max_bytes:
            raise KafkaError(Errors.TELEMETRY_TOO_LARGE)

    def _metrics_of(self, request: PushTelemetryRequest) -> bytes:
        limit_bytes = EXPANSION * self._config.telemetry_max_bytes
        try:
            metrics = decompress(Compression(request.compression_type), request.metrics, limit_bytes)
        except (CorruptBatchError, BatchTooLargeError) as error:
            raise KafkaError(Errors.INVALID_RECORD, str(error)) from None
        if not is_protobuf(metrics):
            raise KafkaError(Errors.INVALID_RECORD)
        return metrics

    def _fresh_id(self) -> bytes:
        while True:
            instance_id = self._new_id()
            if instance_id not in self._instances and instance_id not in RESERVED_IDS:
                return instance_id

    def _instance(self, instance_id: bytes, facts: ClientFacts, image: MetadataImage, now_ms: int) -> _Instance:
        """The instance under the subscriptions of now. Other subscriptions make it a new one, which may ask at once."""
        self._follow(image)
        self._forget_quiet(now_ms)
        instance = self._instances.get(instance_id)
        if instance is None or instance.subscriptions is not self._subscriptions:
            attributes = facts.attributes(instance_id) if instance is None else instance.attributes
            instance = self._instances[instance_id] = self._new_instance(instance_id, attributes)
            facts.instance_id = instance_id
        instance.last_seen_ms = now_ms
        self._instances.move_to_end(instance_id)
        return instance

    def _follow(self, image: MetadataImage) -> None:
        if image is self._image:
            return
        self._image = image
        found = subscriptions_of(image)
        if found != self._subscriptions:
            self._subscriptions = found

    def _forget_quiet(self, now_ms: int) -> None:
        while self._instances:
            oldest = next(iter(self._instances.values()))
            if len(self._instances) < MOST_INSTANCES and now_ms - oldest.last_seen_ms < oldest.memory_ms:
                return
            self._instances.popitem(last=False)

    def _new_instance(self, instance_id: bytes, attributes: Mapping[str, str]) -> _Instance:
        matching = [one for one in self._subscriptions if one.matches(attributes)]
        metrics = sorted({metric for one in matching for metric in one.metrics})
        if ALL_METRICS in metrics:
            metrics = [ALL_METRICS]
        interval_ms = min([DEFAULT_INTERVAL_MS, *(one.interval_ms for one in matching)])
        subscription_id = _subscription_id(metrics, interval_ms, instance_id)
        return _Instance(attributes, self._subscriptions, subscription_id, metrics, interval_ms)


def _subscription_id(metrics: Sequence[str], interval_ms: int, instance_id: bytes) -> int:
    """Equal for what is asked of one instance on any broker: a checksum of it, mixed with the id."""
    mixed = crc32c(f"[{', '.join(metrics)}]{interval_ms}".encode())
    for position in range(0, len(instance_id), 4):
        mixed ^= int.from_bytes(instance_id[position : position + 4], "big")
    return mixed - (1 << 32) if mixed >= 1 << 31 else mixed


MOST_FIELDS: Final = 1_000
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_FIXED_BYTES: Final = {_FIXED_64: 8, _FIXED_32: 4}
_LONGEST_VARINT: Final = 10


def is_protobuf(data: bytes) -> bool:
    """Whether the bytes are the fields of a protobuf message, one after the other to the end, and not more of them than
    any client's metrics have: they are looked at in the event loop.
    """
    position = count = 0
    while position < len(data):
        count += 1
        if count > MOST_FIELDS:
            return False
        tag, position = _varint(data, position)
        kind = tag & 7
        if position < 0 or tag >> 3 == 0:
            return False
        if kind == _VARINT:
            _, position = _varint(data, position)
        elif kind == _BYTES:
            size, position = _varint(data, position)
            position = position + size if position >= 0 else position
        elif kind in _FIXED_BYTES:
            position += _FIXED_BYTES[kind]
        else:
            return False
        if position < 0:
            return False
    return position == len(data)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at `position`, and where it ends; -1 as the end where it is cut off or too long."""
    value = 0
    for count in range(_LONGEST_VARINT):
        if position + count >= len(data):
            break
        byte = data[position + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, position + count + 1
    return 0, -1
