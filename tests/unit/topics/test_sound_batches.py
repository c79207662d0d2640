# SPDX-License-Identifier: Apache-2.0
"""Batches that are stored at once are stored as the checks that name each fault would store them."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest

from kcoord.topics.validation import BatchRules, stamp_batch
from kcoord_protocol import compiled, record_check
from kcoord_protocol.batch_header import BatchHeader
from kcoord_protocol.errors import KafkaError
from tests.support.batch_corpus import NOW_MS, broken_batches, sound_batches, with_crc
from tests.support.shared import missing

LARGEST = 2**63 - 1
RULES = [
    BatchRules(1 << 20, 1 << 20),
    BatchRules(1 << 20, 1 << 20, compacted=True, timestamp_before_max_ms=1000, timestamp_after_max_ms=1000),
    BatchRules(1 << 20, 400),
    BatchRules(400, 1 << 20),
]
FIELDS = {
    "leader epoch": (12, ">i", (-1, 7)),
    "magic": (16, ">b", (-1, 0, 1, 3)),
    "attributes": (21, ">h", (1, 7, 0x08, 0x10, 0x20, 0x40, 0x80, 0x100, -1, -(2**15))),
    "last offset delta": (23, ">i", (-1, -(2**31), 2**31 - 1)),
    "base timestamp": (27, ">q", (-1, -2, 2**62 + 1, -(2**63), LARGEST)),
    "max timestamp": (35, ">q", (-1, -2, NOW_MS, -(2**63), LARGEST)),
    "producer id": (43, ">q", (0, 4711, -2, -(2**63))),
    "sequence": (53, ">i", (-2, 2**31 - 1)),
    "count": (57, ">i", (0, -1, -(2**31), 2**31 - 1)),
}


@pytest.fixture(params=["pure", "compiled"])
def form(request: pytest.FixtureRequest) -> ModuleType:
    if request.param == "compiled" and not compiled.IS_COMPILED:
        missing("the module compiled_record_check does not exist: make env compiles it if there is a C compiler")
    if request.param == "pure":
        return record_check
    from kcoord_protocol import compiled_record_check

    return compiled_record_check


def sent_batches() -> Iterator[bytes]:
    """Yields the batches of the corpus as a producer sends them, and some with one or two other fields."""
    for batch in (*sound_batches(), *broken_batches()):
        yield batch
        yield bytes(8) + batch[8:]
    for batch in sound_batches():
        if len(batch) > 3000:
            continue
        for position, layout, values in FIELDS.values():
            for value in values:
                changed = bytearray(bytes(8) + batch[8:])
                struct.pack_into(layout, changed, position, value)
                yield with_crc(bytes(changed))
                struct.pack_into(">qhi", changed, 43, 4711, 2, 5)
                yield with_crc(bytes(changed))


def stored_after_all_checks(batch: bytes, rules: BatchRules) -> tuple[bytes, BatchHeader] | None:
    """Returns what is stored, or None if the batch is rejected."""
    slow = replace(rules)
    slow.keeps_batches = False
    try:
        return stamp_batch(batch, slow, base_offset=500, leader_epoch=3, now_ms=NOW_MS)
    except KafkaError:
        return None


def test_the_corpus(form: ModuleType) -> None:
    at_once = 0
    for batch in sent_batches():
        for rules in RULES:
            stamped = form.stamp_sound_batch(
                memoryview(batch),
                500,
                3,
                rules.most_stored_bytes,
                rules.compacted,
                NOW_MS - rules.timestamp_before_max_ms,
                NOW_MS + rules.timestamp_after_max_ms,
            )
            if stamped is not None:
                at_once += 1
                assert stamped == stored_after_all_checks(batch, rules)
    assert at_once > 500
