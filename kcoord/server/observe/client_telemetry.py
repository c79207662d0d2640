# SPDX-License-Identifier: Apache-2.0
"""Client telemetry (KIP-714): assigns metrics and a push interval to client instances, and receives their metrics."""

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
"""The number of client instances that are remembered. As in Kafka, the least recently used instance is dropped."""
SHORTEST_MEMORY_MS: Final = 60_000
MEMORY_INTERVALS: Final = 3
"""An instance is forgotten if it sends no request for this many push intervals, and for at least a minute."""
ACCEPTED_COMPRESSION: Final = (Compression.ZSTD, Compression.LZ4, Compression.GZIP, Compression.SNAPPY)
ALL_METRICS: Final = "*"
EXPANSION: Final = 16
"""Decompressed metrics may be this many times as large as `telemetry.max.bytes`."""
RESERVED_IDS: Final = frozenset((ZERO_UUID, bytes(15) + b"\x01"))

Receiver = Callable[[bytes], None]
"""Receives metrics in OpenTelemetry's protobuf format MetricsData."""


@dataclass(slots=True)
class ClientFacts:
    """The facts that a connection has about its client. `instance_id`: the instance that last became known on it."""

    client_id: str = ""
    software_name: str = ""
    software_version: str = ""
    address: str = ""
    port: int = 0
    instance_id: bytes | None = None

    def attributes(self, instance_id: bytes) -> Mapping[str, str]:
        """Returns the attributes that a subscription may match, by the names of KIP-714."""
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
    """A client instance with its limits. The attributes do not change if the instance uses another connection."""

    attributes: Mapping[str, str]
    subscriptions: Sequence[MetricsSubscription]
    """All subscriptions of the image from which the next three fields were computed."""
    subscription_id: int
    metrics: list[str]
    interval_ms: int
    last_get_ms: int = 0
    last_push_ms: int = 0
    last_seen_ms: int = 0
    is_terminating: bool = False

    def may_get(self, now_ms: int) -> bool:
        """Returns whether the push interval has passed since the last request, and if so, notes this one."""
        if now_ms - max(self.last_get_ms, self.last_push_ms) < self.interval_ms:
            return False
        self.last_get_ms = now_ms
        return True

    def may_push(self, now_ms: int) -> bool:
        """Returns whether a push may come now, and if so, notes it.

        The first push after GetTelemetrySubscriptions may come early, because clients spread their pushes in time.
        """
        if self.last_get_ms <= self.last_push_ms and now_ms - self.last_push_ms < self.interval_ms:
            return False
        self.last_push_ms = now_ms
        return True

    @property
    def memory_ms(self) -> int:
        return max(SHORTEST_MEMORY_MS, MEMORY_INTERVALS * self.interval_ms)


class ClientTelemetry:
    """The client instances of one broker.

    Subscriptions are configs in the metadata image. Instances are known only to the broker that they connect to, and
    only in memory. `new_id` makes ids of client instances. `receive` gets metrics that were pushed, decompressed,
    after a check that they are a protobuf message.
    """

    def __init__(self, config: BrokerConfig, new_id: Callable[[], bytes], receive: Receiver) -> None:
        self._config = config
        self._new_id = new_id
        self._receive = receive
        self._image: MetadataImage | None = None
        self._subscriptions: Sequence[MetricsSubscription] = ()
        self._instances: OrderedDict[bytes, _Instance] = OrderedDict()

    def __len__(self) -> int:
        """Returns the number of instances that are remembered."""
        return len(self._instances)

    def get_subscriptions(
        self, request: GetTelemetrySubscriptionsRequest, facts: ClientFacts, image: MetadataImage, now_ms: int
    ) -> GetTelemetrySubscriptionsResponse:
        """Returns the metrics that the client has to push, and how often.

        Raises THROTTLING_QUOTA_EXCEEDED if the client repeats the request too early.
        """
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
        """Passes metrics to the receiver. Raises KafkaError with the code of KIP-714 if they are rejected."""
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
        """Forgets an instance whose connection has ended. On a new connection it may ask and push at once."""
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
        """Returns the instance with the current subscriptions.

        If the subscriptions have changed, the instance is replaced by a new one, which may ask at once.
        """
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
        subscriptions = subscriptions_of(image)
        if subscriptions != self._subscriptions:
            self._subscriptions = subscriptions

    def _forget_quiet(self, now_ms: int) -> None:
        while self._instances:
            oldest = next(iter(self._instances.values()))
            if len(self._instances) < MOST_INSTANCES and now_ms - oldest.last_seen_ms < oldest.memory_ms:
                return
            self._instances.popitem(last=False)

    def _new_instance(self, instance_id: bytes, attributes: Mapping[str, str]) -> _Instance:
        matching = [subscription for subscription in self._subscriptions if subscription.matches(attributes)]
        metrics = sorted({metric for subscription in matching for metric in subscription.metrics})
        if ALL_METRICS in metrics:
            metrics = [ALL_METRICS]
        interval_ms = min([DEFAULT_INTERVAL_MS, *(subscription.interval_ms for subscription in matching)])
        subscription_id = _subscription_id(metrics, interval_ms, instance_id)
        return _Instance(attributes, self._subscriptions, subscription_id, metrics, interval_ms)


def _subscription_id(metrics: Sequence[str], interval_ms: int, instance_id: bytes) -> int:
    """Returns a checksum of the metrics and the interval, mixed with the instance id.

    All brokers compute the same id for the same instance and the same subscriptions.
    """
    mixed = crc32c(f"[{', '.join(metrics)}]{interval_ms}".encode())
    for position in range(0, len(instance_id), 4):
        mixed ^= int.from_bytes(instance_id[position : position + 4], "big")
    return mixed - (1 << 32) if mixed >= 1 << 31 else mixed


MOST_FIELDS: Final = 1_000
_VARINT, _FIXED_64, _BYTES, _FIXED_32 = 0, 1, 2, 5
_FIXED_BYTES: Final = {_FIXED_64: 8, _FIXED_32: 4}
_LONGEST_VARINT: Final = 10


def is_protobuf(data: bytes) -> bool:
    """Returns whether the bytes are the fields of a protobuf message, without a gap and up to the end.

    Returns False for more than `MOST_FIELDS` fields at the top level, because this runs in the event loop. The metrics
    of real clients have far fewer.
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
    """Returns the number at `position` and the position after it, which is -1 if the number is cut off or too long."""
    value = 0
    for count in range(_LONGEST_VARINT):
        if position + count >= len(data):
            break
        byte = data[position + count]
        value |= (byte & 0x7F) << (7 * count)
        if byte < 0x80:
            return value, position + count + 1
    return 0, -1
