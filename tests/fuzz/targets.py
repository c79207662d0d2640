# SPDX-License-Identifier: Apache-2.0
"""The targets of the coverage-guided fuzzer: one function per decoder that clients reach.

Any exception except those by which a decoder rejects its input is a finding.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from kcoord.coordinator.group import regex
from kcoord.coordinator.group.classic import consumer_protocol
from kcoord.server.api.served_versions import SERVED_VERSIONS
from kcoord.storage.record_filter import iter_raw
from kcoord.topics.validation import BatchRules, single_batch, stamp_batch
from kcoord_protocol.api_keys import ApiKey, request_class
from kcoord_protocol.batch_header import crc32c
from kcoord_protocol.compression import Compression
from kcoord_protocol.errors import DecodeError, KafkaError
from kcoord_protocol.framing import decode_request_header, encode_request
from kcoord_protocol.message import Decoder, Message
from kcoord_protocol.messages import ConsumerProtocolAssignment, ConsumerProtocolSubscription
from kcoord_protocol.record_batch import Record, decode_entries, decode_records, encode_batch, iter_headers, records_of
from tests.fuzz import login_targets
from tests.fuzz.corpus import findings, recorded
from tests.protocol.samples import full_sample
from tests.protocol.test_malformed import decodes_alike

CORPUS: Final = Path(__file__).parent / "inputs" / "guided"
_RULES: Final = (
    BatchRules(max_message_bytes=1 << 20, segment_bytes=1 << 20),
    BatchRules(max_message_bytes=1 << 20, segment_bytes=1 << 20, compacted=True, log_append_time=True),
    BatchRules(max_message_bytes=1 << 20, segment_bytes=1 << 20, compression=Compression.GZIP),
)
_CRC_END: Final = 21


def requests(data: bytes) -> None:
    """Decodes a frame without its length: the header, then the body with compiled code and with the reference codec."""
    try:
        key = ApiKey(int.from_bytes(data[:2], "big"))
    except ValueError:
        return
    version = int.from_bytes(data[2:4], "big")
    if version not in SERVED_VERSIONS.get(key, ()) or version not in request_class(key).valid_versions:
        return
    try:
        _, position = decode_request_header(data)
    except DecodeError:
        return
    cls = request_class(key)
    body = data[position:]
    if decodes_alike(cls, body, version):
        message = cls.decode(body, version)
        assert cls.decode(message.encode(version), version) == message or "nan" in repr(message)


def batches(data: bytes) -> None:
    """Checks the records of a Produce request, with a correct CRC."""
    if len(data) > _CRC_END:
        data = data[:17] + crc32c(data[_CRC_END:]).to_bytes(4, "big") + data[_CRC_END:]
    for rules in _RULES:
        try:
            batch = single_batch(memoryview(data), 9)
            stored, header = stamp_batch(batch, rules, base_offset=7, leader_epoch=1, now_ms=1_700_000_000_000)
        except KafkaError:
            continue
        assert header.base_offset == 7
        assert list(iter_headers(stored)) == [(0, header)]
    readers(data)


def readers(data: bytes) -> None:
    """Runs all readers of unchecked batches. Each one returns the records or raises DecodeError."""
    try:
        for position, header in iter_headers(data):
            offsets = [offset for offset, _, _ in decode_entries(data, position, max_bytes=1 << 24)]
            assert [record.offset for record in decode_records(data, position, max_bytes=1 << 24)] == offsets
            raw = iter_raw(records_of(data, position, header, 1 << 24), header.records_count)
            assert [header.base_offset + record.offset_delta for record in raw] == offsets
    except DecodeError:
        return


def subscriptions(data: bytes) -> None:
    """Decodes the subscription and the assignment that members of classic groups send."""
    subscription = consumer_protocol.read_subscription(data)
    assignment = consumer_protocol.read_assignment(data)
    assert subscription is None or isinstance(subscription.topics, list)
    assert assignment is None or isinstance(assignment.assigned_partitions, list)


def regexes(data: bytes) -> None:
    """Compiles and matches a subscription by regular expression."""
    try:
        matches = regex.compile_pattern(data.decode())
    except (UnicodeDecodeError, KafkaError):
        return
    for name in ("orders", "a" * 249, ""):
        matches(name)


def _request_seeds() -> list[bytes]:
    frames = [*recorded(), *findings()]
    for key, versions in SERVED_VERSIONS.items():
        cls = request_class(key)
        version = max(set(versions) & set(cls.valid_versions))
        frames.append(encode_request(key, version, 1, "c", full_sample(cls, version).encode(version))[4:])
    return frames


def _batch_seeds() -> list[bytes]:
    records = [Record(key=b"k", value=b"v" * 20, timestamp_ms=1000), Record(value=None, headers=[("h", b"1")])]
    return [encode_batch(records, compression=codec) for codec in Compression]


def _subscription_seeds() -> list[bytes]:
    return [
        version.to_bytes(2, "big") + full_sample(cls, version).encode(version)
        for cls in (ConsumerProtocolSubscription, ConsumerProtocolAssignment)
        for version in cls.valid_versions
    ]


def _regex_seeds() -> list[bytes]:
    return [b"orders", b"(a|b)*c{2,5}", b"[[:alpha:]]+\\pN", b"(?i:x)\\bz$", b"^.{1,100}?[^a-z]"]


TARGETS: Final[dict[str, tuple[Callable[[bytes], None], Callable[[], list[bytes]]]]] = {
    "requests": (requests, _request_seeds),
    "batches": (batches, _batch_seeds),
    "subscriptions": (subscriptions, _subscription_seeds),
    "regexes": (regexes, _regex_seeds),
    "sasl": (login_targets.sasl, login_targets.sasl_seeds),
    "tokens": (login_targets.tokens, login_targets.token_seeds),
    "jaas": (login_targets.jaas, login_targets.jaas_seeds),
}


def seeds_of(name: str) -> list[bytes]:
    return TARGETS[name][1]()


def compiled_decoders() -> list[dict[int, Decoder]]:
    """Compiles the decoders of all requests and of the consumer protocol: version -> decoder. Callers replace them."""
    classes: list[type[Message]] = [ConsumerProtocolAssignment, ConsumerProtocolSubscription]
    classes += [request_class(key) for key in SERVED_VERSIONS]
    for cls in classes:
        for version in cls.valid_versions:
            assert callable(cls._decoders[version])
    return [cls._decoders for cls in classes]


def kept(name: str) -> list[bytes]:
    """Returns the inputs of earlier runs. Each one reaches code that the other inputs do not reach."""
    path = CORPUS / f"{name}.txt"
    return [bytes.fromhex(line) for line in path.read_text().splitlines()] if path.exists() else []
