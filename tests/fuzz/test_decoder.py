# SPDX-License-Identifier: Apache-2.0
"""400,000 damaged requests through the decoders: each is decoded or rejected quickly, with no other outcome.

`KCOORD_FUZZ_INPUTS` sets another number. `make soak` takes 2,000,000.
"""

from __future__ import annotations

import os
import resource
from random import Random

import pytest

from kcoord.server.api.served_versions import SERVED_VERSIONS
from kcoord_protocol.api_keys import request_class
from kcoord_protocol.framing import decode_request_header
from kcoord_protocol.message import _CODEC_FAILURES, Message
from tests.fuzz.corpus import recorded
from tests.fuzz.mutation import damaged, plausible
from tests.protocol.samples import full_sample
from tests.protocol.test_malformed import decodes_alike

INPUTS = int(os.environ.get("KCOORD_FUZZ_INPUTS", "400000"))
CHUNKS = 40
COMPARED_EVERY = 10
"""The reference codec is slow, so it decodes only every tenth input."""
MOST_MEMORY_KIB = 400 * 1024

Seed = tuple[type[Message], int, bytes]


def seeds() -> list[Seed]:
    """Returns (class, version, body) of recorded requests, and of full samples and plausible messages per version."""
    bodies: list[Seed] = []
    for frame in recorded():
        header, position = decode_request_header(frame)
        bodies.append((request_class(header.request_api_key), header.request_api_version, frame[position:]))
    chance = Random(1)
    for key, versions in SERVED_VERSIONS.items():
        cls = request_class(key)
        for version in versions:
            if version in cls.valid_versions:
                messages = [full_sample(cls, version), *(plausible(cls, version, chance) for _ in range(3))]
                bodies += [(cls, version, message.encode(version)) for message in messages]
    return bodies


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_damaged_requests(chunk: int) -> None:
    chance = Random(chunk)
    starts = seeds()
    accepted = 0
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(INPUTS // CHUNKS):
        cls, version, body = starts[chance.randrange(len(starts))]
        data = damaged(body, chance)
        if number % COMPARED_EVERY == 0:
            decodes_alike(cls, data, version)
            continue
        try:
            message, end = cls._decoders[version](data, 0)
        except _CODEC_FAILURES:
            continue
        if end == len(data) and not number % 7:
            assert cls.decode(message.encode(version), version) == message or "nan" in repr(message)
            accepted += 1
    assert accepted, "every damaged request was rejected, so the damage is too coarse"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < MOST_MEMORY_KIB
