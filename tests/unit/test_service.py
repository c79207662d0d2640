# SPDX-License-Identifier: Apache-2.0
"""Kafka's brokers and kcoord assign a group to the same partition of the offsets topic."""

from __future__ import annotations

import pytest

from kcoord.runtime.serde import java_string_hash, partition_for


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("a", 97),
        ("hello", 99162322),
        ("Hello World", -862545276),
        ("polygenelubricants", -2147483648),
        ("console-consumer-12345", None),
        ("é", 233),
        ("\U0001f600", 1772899),
        ("\ud83d\ude00"[:1], 55357),
    ],
)
def test_the_hash_equals_java_string_hash_code(text: str, expected: int | None) -> None:
    units = text.encode("utf-16-be", "surrogatepass")
    value = 0
    for i in range(0, len(units), 2):
        value = 31 * value + int.from_bytes(units[i : i + 2], "big")
    value = (value + 2**31) % 2**32 - 2**31
    assert java_string_hash(text) == value
    if expected is not None:
        assert value == expected


def test_the_partition_is_the_absolute_hash_modulo_the_count() -> None:
    assert partition_for("polygenelubricants", 50) == 0
    assert partition_for("Hello World", 50) == 862545276 % 50
    # Partitions to which a broker of Kafka 4.3.1 assigned groups with a negative hash.
    assert partition_for("gclassic", 5) == 0
    assert partition_for("coop-classic", 8) == 6
    assert partition_for("stalled", 8) == 1
    assert {partition_for(f"group-{i}", 50) for i in range(1_000)} == set(range(50))
