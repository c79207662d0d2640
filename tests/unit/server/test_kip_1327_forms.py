# SPDX-License-Identifier: Apache-2.0
"""The forms of KIP-1327, byte for byte. Requests and responses are written by hand from both revisions of the KIP.

The name of the software in ApiVersions (v3 and later) selects the form of a connection.
"""

from __future__ import annotations

import asyncio
from struct import pack

import pytest

from kcoord.metadata.image import ImageBuilder
from kcoord.runtime.result import CoordinatorRecord
from kcoord.server.fast.metadata import MetadataResponses
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.net.request_path import RequestPath
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import ApiVersionsResponse, FeatureLevelRecord, Message, PartitionRecord, TopicRecord
from tests.unit.server.harness import Harness

METADATA, API_VERSIONS, HEARTBEAT, DESCRIBE, DESCRIBE_TOPICS = 3, 18, 68, 69, 75
TOPIC_ID = bytes(range(16))
GROUP_MS = 1_700_000_000_000
GROUP_MS_BYTES = bytes.fromhex("0000018bcfe56800")
HIGHEST = {
    "off": (1, 1, 13, 0),
    "creation-time": (2, 2, 14, 1),
    "new-partitions": (2, 1, 13, 0),
}
"""The highest versions of ConsumerGroupHeartbeat, ConsumerGroupDescribe, Metadata and DescribeTopicPartitions."""
EPOCH = 4
"""The epoch of member-1. An earlier member joined and left, which raised the group epoch to 3."""
REVISIONS = "later:new-partitions,apache:off,text:creation-time,text:off,*:creation-time"


class Client:
    """A connection whose requests are given as bytes."""

    def __init__(
        self, harness: Harness, answers: MetadataResponses | None = None, *, has_fast_paths: bool = True
    ) -> None:
        settings = PathSettings(harness.broker, "PLAINTEXT", 100_000, 100_000, has_fast_paths, answers)
        self.path = RequestPath(settings, lambda: None, "192.0.2.7", 4711)

    async def name(self, software: bytes) -> dict[int, int]:
        """Sends ApiVersions v3 with the name of the software. Returns the highest versions."""
        body = compact(software) + compact(b"1.0") + b"\x00"
        answer = await self.ask(API_VERSIONS, 3, body, flexible_answer=False)
        response = ApiVersionsResponse.decode(answer, 3)
        assert response.error_code == 0
        return {api.api_key: api.max_version for api in response.api_keys}

    async def ask(self, key: int, version: int, body: bytes, *, flexible_answer: bool = True) -> bytes:
        """Returns the body of the response, empty if there is none."""
        head = pack(">hhi", key, version, 7) + pack(">h", 1) + b"c" + b"\x00"
        self.path.receive(pack(">i", len(head) + len(body)) + head + body)
        for _ in range(60):
            await asyncio.sleep(0)
        answer = self.path.take_output()
        if not answer:
            return b""
        assert answer[:8] == pack(">ii", len(answer) - 4, 7)
        return answer[9:] if flexible_answer else answer[8:]


def compact(text: bytes) -> bytes:
    return bytes([len(text) + 1]) + text


def heartbeat(member: bytes, epoch: int) -> bytes:
    """Returns a request in v1 and v2. A joining member sets all fields, a steady member only its id and epoch."""
    joins = epoch == 0
    return (
        compact(b"g")
        + compact(member)
        + pack(">i", epoch)
        + b"\x00\x00"  # no instance id, no rack
        + pack(">i", 45_000 if joins else -1)
        + (b"\x02" + compact(b"t") if joins else b"\x00")  # names
        + b"\x00\x00"  # no regex, no assignor
        + (b"\x01" if joins else b"\x00")  # owns no partitions, or null
        + b"\x00"
    )


def joined(group_time: bytes, tags_of_topic: bytes, tags_of_response: bytes = b"\x00") -> bytes:
    """Returns the response to the only member of the group: all three partitions."""
    return (
        pack(">ih", 0, 0)  # throttle time, error
        + b"\x00"  # no message
        + compact(b"member-1")
        + pack(">ii", EPOCH, 5000)  # epoch, interval
        + group_time
        + b"\x01"  # an assignment
        + b"\x02"
        + TOPIC_ID
        + b"\x04"
        + pack(">iii", 0, 1, 2)
        + tags_of_topic
        + b"\x00"  # tags of the assignment
        + tags_of_response
    )


ONE_IS_NEW = b"\x01" + b"\x00" + b"\x05" + b"\x02" + pack(">i", 2)
"""One tagged field, tag 0, 5 bytes: an array of one int32."""
GROUP_TIME_TAG = b"\x01" + b"\xf8\x55" + b"\x08" + GROUP_MS_BYTES
"""One tagged field, tag 11000, 8 bytes."""


def unchanged(group_time: bytes, tags_of_response: bytes = b"\x00") -> bytes:
    """Returns the response to a steady member: no assignment."""
    head = pack(">ih", 0, 0) + b"\x00" + compact(b"member-1") + pack(">ii", EPOCH, 5000)
    return head + group_time + b"\xff" + tags_of_response


def failed(error: Errors, message: bytes, group_time: bytes) -> bytes:
    head = pack(">ih", 0, error) + compact(message) + b"\x00" + pack(">ii", 0, 0)
    return head + group_time + b"\xff" + b"\x00"


async def new_harness() -> Harness:
    harness = Harness(kcoord_kip1327_revisions=REVISIONS)
    harness.now = GROUP_MS
    records: list[Message] = [
        FeatureLevelRecord(name="group.version", feature_level=1),
        TopicRecord(name="t", topic_id=TOPIC_ID),
    ]
    records += [
        PartitionRecord(partition_id=number, topic_id=TOPIC_ID, replicas=[1], isr=[1], leader=1, creation_time_ms=at_ms)
        for number, at_ms in enumerate((-1, GROUP_MS - 1, GROUP_MS - 1))
    ]
    harness.broker.image = harness.image = ImageBuilder.of(CoordinatorRecord(None, record) for record in records)
    await harness.open()
    first = Client(harness)
    assert await first.ask(HEARTBEAT, 1, heartbeat(b"member-0", 0))
    assert await first.ask(HEARTBEAT, 1, heartbeat(b"member-0", -1))
    set_creation_times(harness)
    return harness


def set_creation_times(harness: Harness) -> None:
    """Sets the creation times: unknown for partition 0, the group's for partition 1, later for partition 2.

    The group has to exist already, because a group gets no earlier time than the partitions that exist.
    """
    builder = ImageBuilder(harness.image)
    for number, at_ms in enumerate((-1, GROUP_MS, GROUP_MS + 1)):
        record = PartitionRecord(
            partition_id=number, topic_id=TOPIC_ID, replicas=[1], isr=[1], leader=1, creation_time_ms=at_ms
        )
        builder.replay(CoordinatorRecord(None, record))
    harness.broker.image = harness.image = builder.build()
    harness.groups.on_metadata_update(harness.image)


UNKNOWN_TIME_BYTES = b"\xff" * 8


@pytest.mark.parametrize(
    ("software", "version", "expected", "steady", "unknown_member_time"),
    [
        (b"later", 2, joined(b"", ONE_IS_NEW), unchanged(b""), b""),
        (b"later", 1, joined(b"", b"\x00"), unchanged(b""), b""),
        (b"apache", 1, joined(b"", b"\x00"), unchanged(b""), b""),
        (b"text", 2, joined(GROUP_MS_BYTES, b"\x00"), unchanged(GROUP_MS_BYTES), UNKNOWN_TIME_BYTES),
        (b"text", 1, joined(b"", b"\x00", GROUP_TIME_TAG), unchanged(b"", GROUP_TIME_TAG), b""),
        (b"text", 0, joined(b"", b"\x00"), unchanged(b""), b""),
        (b"later", 0, joined(b"", b"\x00"), unchanged(b""), b""),
    ],
    ids=["later-2", "later-1", "apache-1", "text-2", "text-1", "text-0", "later-0"],
)
@pytest.mark.parametrize("has_fast_paths", [True, False])
async def test_the_heartbeat_of_each_form(
    software: bytes, version: int, expected: bytes, steady: bytes, unknown_member_time: bytes, has_fast_paths: bool
) -> None:
    client = Client(await new_harness(), has_fast_paths=has_fast_paths)
    await client.name(software)
    first = heartbeat(b"member-1", 0)
    assert (await client.ask(HEARTBEAT, version, first if version else first_of_v0(first))).hex() == expected.hex()
    for _ in range(3):
        body = heartbeat(b"member-1", EPOCH)
        got = await client.ask(HEARTBEAT, version, body if version else first_of_v0(body))
        assert got.hex() == steady.hex()
    body = heartbeat(b"nobody", EPOCH)
    got = await client.ask(HEARTBEAT, version, body if version else first_of_v0(body))
    message = got[7 : 6 + got[6]]  # the message is not Kafka's
    assert got.hex() == failed(Errors.UNKNOWN_MEMBER_ID, message, unknown_member_time).hex()


def first_of_v0(body: bytes) -> bytes:
    """Converts a request to v0, which has no regular expression: there is one null less before the assignor."""
    return body[:-3] + body[-2:]


@pytest.mark.parametrize("software", [b"", b"later", b"apache", b"text", b"another"])
async def test_each_form_has_its_versions_and_no_others(software: bytes) -> None:
    harness = await new_harness()
    form = {b"later": "new-partitions", b"apache": "off"}.get(software, "creation-time")
    keys = (HEARTBEAT, DESCRIBE, METADATA, DESCRIBE_TOPICS)
    if software:
        versions = await Client(harness).name(software)
        assert tuple(versions[key] for key in keys) == HIGHEST[form]
    for key, highest in zip(keys, HIGHEST[form], strict=True):
        client = Client(harness)
        if software:
            await client.name(software)
        assert client.path.apis.bound(pack(">hh", key, highest)) is not None
        assert await client.ask(key, highest + 1, b"\x00") == b""
        assert client.path.close_reason == f"{ApiKey(key).name} v{highest + 1} is not served"


async def test_a_connection_that_names_itself_again_gets_the_other_form() -> None:
    client = Client(await new_harness())
    steady = heartbeat(b"member-1", EPOCH)
    await client.ask(API_VERSIONS, 0, b"")
    await client.ask(HEARTBEAT, 2, heartbeat(b"member-1", 0))
    for _ in range(2):
        assert await client.ask(HEARTBEAT, 2, steady) == unchanged(GROUP_MS_BYTES)
        assert await client.ask(HEARTBEAT, 1, steady) == unchanged(b"", GROUP_TIME_TAG)
        await client.name(b"later")
        assert await client.ask(HEARTBEAT, 2, steady) == unchanged(b"")
        assert await client.ask(HEARTBEAT, 1, steady) == unchanged(b"")
        # A version without a name selects `*` again.
        await client.ask(API_VERSIONS, 0, b"")
    await client.name(b"apache")
    assert await client.ask(HEARTBEAT, 2, steady) == b""


@pytest.mark.parametrize("has_fast_paths", [True, False])
async def test_a_client_that_does_not_begin_with_api_versions_gets_no_tagged_field(has_fast_paths: bool) -> None:
    """Some decoders fail on tagged fields that they do not know."""
    harness = await new_harness()
    client = Client(harness, has_fast_paths=has_fast_paths)
    steady = heartbeat(b"member-1", EPOCH)
    assert await client.ask(HEARTBEAT, 1, heartbeat(b"member-1", 0)) == joined(b"", b"\x00")
    await client.name(b"text")
    for _ in range(3):
        assert await client.ask(HEARTBEAT, 1, steady) == unchanged(b"")
        assert await client.ask(HEARTBEAT, 2, steady) == unchanged(GROUP_MS_BYTES)
    negotiating = Client(harness, has_fast_paths=has_fast_paths)
    await negotiating.ask(API_VERSIONS, 0, b"")
    for _ in range(3):
        assert await negotiating.ask(HEARTBEAT, 1, steady) == unchanged(b"", GROUP_TIME_TAG)


async def test_a_cached_metadata_response_counts_as_the_first_request() -> None:
    harness = await new_harness()
    answers = MetadataResponses()
    body = b"\x02" + bytes(16) + b"\x02t" + b"\x00" + b"\x00\x00" + b"\x00"
    await Client(harness, answers).ask(METADATA, 13, body)
    client = Client(harness, answers)
    await client.ask(METADATA, 13, body)
    await client.name(b"text")
    assert not client.path.client.begins_with_api_versions


async def test_an_invalid_software_name_changes_nothing() -> None:
    client = Client(await new_harness())
    await client.name(b"later")
    await client.ask(API_VERSIONS, 3, compact(b"-bad-") + compact(b"1") + b"\x00", flexible_answer=False)
    assert client.path.client.software == ("later", "1.0")
    assert client.path.apis.form.value == "new-partitions"


async def test_a_cached_metadata_response_is_not_sent_to_another_form() -> None:
    harness = await new_harness()
    answers = MetadataResponses()
    body = b"\x02" + bytes(16) + b"\x02t" + b"\x00" + b"\x00\x00" + b"\x00"  # topic t, no creation, no operations
    text, off = Client(harness, answers), Client(harness, answers)
    await off.name(b"apache")
    with_times = await text.ask(METADATA, 14, body)
    assert b"\x01\x00\x08" + pack(">q", GROUP_MS + 1) in with_times
    assert await text.ask(METADATA, 14, body) == with_times
    assert await off.ask(METADATA, 13, body) == await text.ask(METADATA, 13, body)
    assert await off.ask(METADATA, 14, body) == b""


def described(group_time: bytes, tags: bytes) -> bytes:
    """Returns the description of the group without members."""
    return (
        pack(">i", 0)
        + b"\x02"
        + pack(">h", 0)
        + b"\x00"
        + compact(b"g")
        + compact(b"Empty")
        + pack(">ii", 3, 3)
        + compact(b"uniform")
        + b"\x01"  # no members
        + group_time
        + pack(">i", -(2**31))
        + tags
        + b"\x00"
    )


@pytest.mark.parametrize(
    ("software", "version", "expected"),
    [
        (b"text", 2, described(GROUP_MS_BYTES, b"\x00")),
        (b"text", 1, described(b"", GROUP_TIME_TAG)),
        (b"text", 0, described(b"", b"\x00")),
        (b"later", 1, described(b"", b"\x00")),
        (b"apache", 1, described(b"", b"\x00")),
    ],
    ids=["text-2", "text-1", "text-0", "later-1", "apache-1"],
)
async def test_the_description_of_each_form(software: bytes, version: int, expected: bytes) -> None:
    client = Client(await new_harness())
    await client.name(software)
    got = await client.ask(DESCRIBE, version, b"\x02" + compact(b"g") + b"\x00" + b"\x00")
    assert got.hex() == expected.hex()


async def test_a_group_that_does_not_exist_has_no_tag() -> None:
    client = Client(await new_harness())
    got = await client.ask(DESCRIBE, 1, b"\x02" + compact(b"none") + b"\x00" + b"\x00")
    assert b"\xf8\x55" not in got
    assert got.endswith(pack(">i", -(2**31)) + b"\x00" + b"\x00")
