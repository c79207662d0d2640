# SPDX-License-Identifier: Apache-2.0
"""Each message in each version: decode(encode(x)) == x, and compiled code agrees with the reference codec."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kcoord_protocol import reference
from kcoord_protocol.json_form import from_json, to_json
from kcoord_protocol.messages import message_class
from tests.protocol.samples import ALL_NAMES, full_sample, messages


@pytest.mark.parametrize("name", ALL_NAMES)
@settings(
    max_examples=3,
    deadline=None,
    database=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(data=st.data())
def test_any_message(name: str, data: st.DataObject) -> None:
    cls = message_class(name)
    for version in cls.valid_versions:
        message = data.draw(messages(name, version))
        encoded = message.encode(version)
        assert cls.decode(encoded, version) == message
        assert reference.encode_message(message, version) == encoded
        assert reference.decode_message(cls, encoded, 0, version) == (message, len(encoded))


@pytest.mark.parametrize("name", ALL_NAMES)
def test_full_sample(name: str) -> None:
    cls = message_class(name)
    for version in cls.valid_versions:
        message = full_sample(cls, version)
        encoded = message.encode(version)
        assert cls.decode(encoded, version) == message
        assert cls.decode_prefix(b"ab" + encoded + b"cd", 2, version) == (message, 2 + len(encoded))
        assert cls.decode(bytearray(encoded), version) == message
        assert reference.encode_message(message, version) == encoded
        document = to_json(message, version)
        again = from_json(cls, json.loads(json.dumps(document)), version)
        assert to_json(again, version) == document
