# SPDX-License-Identifier: Apache-2.0
"""The message classes: construction, comparison, values that cannot be encoded, versions, tagged fields."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from kcoord_protocol import messages as messages_module
from kcoord_protocol.errors import EncodeError, UnsupportedFieldError, UnsupportedVersionError
from kcoord_protocol.message import make_class
from kcoord_protocol.messages import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupMemberMetadataValue,
    FetchResponse,
    Message,
    MetadataRequest,
    OffsetCommitRequest,
    OffsetFetchRequest,
    ProduceRequest,
    TopicRecord,
    UpdateFeaturesRequest,
)
from kcoord_protocol.schema import load_schema
from kcoord_protocol.uuid import ZERO_UUID


def commit(**fields: Any) -> OffsetCommitRequest:
    partition = OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=3, committed_offset=9, **fields)
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(name="t", partitions=[partition])
    return OffsetCommitRequest(group_id="g", topics=[topic])


def test_defaults() -> None:
    request = ConsumerGroupHeartbeatRequest()
    assert (request.group_id, request.member_epoch, request.rebalance_timeout_ms) == ("", 0, -1)
    assert request.subscribed_topic_names is None
    assert OffsetCommitRequest.OffsetCommitRequestTopic().topic_id == ZERO_UUID
    assert FetchResponse.PartitionData().records is None
    first, second = OffsetCommitRequest(), OffsetCommitRequest()
    first.topics.append(OffsetCommitRequest.OffsetCommitRequestTopic())
    assert second.topics == []


def test_class_attributes() -> None:
    assert OffsetCommitRequest.name == OffsetCommitRequest.message_name == "OffsetCommitRequest"
    assert OffsetCommitRequest.api_key == 8
    assert 10 in OffsetCommitRequest.valid_versions
    assert OffsetCommitRequest.flexible_versions.start == 8
    assert TopicRecord.message_name == "TopicRecord"
    assert TopicRecord(name="t").name == "t"
    assert isinstance(OffsetCommitRequest(), Message)
    with pytest.raises(AttributeError):
        _ = messages_module.NoSuchRequest  # type: ignore[attr-defined]


def test_unknown_argument_and_attribute_are_rejected() -> None:
    with pytest.raises(TypeError):
        OffsetCommitRequest(group="g")  # type: ignore[call-arg]
    request = OffsetCommitRequest()
    with pytest.raises(AttributeError):
        request.group = "g"  # type: ignore[attr-defined]


def test_equality_repr_copy_pickle() -> None:
    assert commit() == commit()
    assert commit() != commit(committed_metadata="m")
    assert commit() != 1
    assert repr(commit().topics[0].partitions[0]).startswith(
        "OffsetCommitRequest.OffsetCommitRequestPartition(partition_index=3, committed_offset=9, "
    )
    assert copy.deepcopy(commit()) == commit()
    assert pickle.loads(pickle.dumps(commit())) == commit()
    with pytest.raises(TypeError):
        hash(commit())


def test_nothing_is_compiled_before_use() -> None:
    cls = make_class(load_schema("OffsetCommitRequest"), OffsetCommitRequest._explainer)
    assert not cls._decoders
    assert not cls._encoders
    assert "__init__" not in vars(cls)
    cls.decode(cls().encode(9), 9)
    assert list(cls._decoders) == list(cls._encoders) == [9]


def test_versions_that_do_not_exist() -> None:
    for version in (-1, 99):
        with pytest.raises(UnsupportedVersionError, match=f"OffsetCommitRequest has no version {version}"):
            OffsetCommitRequest().encode(version)
        with pytest.raises(UnsupportedVersionError):
            OffsetCommitRequest.decode(b"", version)


@pytest.mark.parametrize(
    ("fields", "version", "path"),
    [
        ({"partition_index": 2**31}, 9, "topics[0].partitions[0].partition_index"),
        ({"committed_offset": "1"}, 2, "topics[0].partitions[0].committed_offset"),
        ({"committed_offset": None}, 2, "topics[0].partitions[0].committed_offset"),
        ({"committed_metadata": b"x"}, 9, "topics[0].partitions[0].committed_metadata"),
        ({"committed_metadata": "\ud800"}, 9, "topics[0].partitions[0].committed_metadata"),
        ({"committed_metadata": "x" * 32768}, 9, "topics[0].partitions[0].committed_metadata"),
        ({"committed_metadata": "x" * 32768}, 2, "topics[0].partitions[0].committed_metadata"),
    ],
)
def test_values_that_do_not_fit(fields: dict[str, Any], version: int, path: str) -> None:
    request = commit()
    for name, value in fields.items():
        setattr(request.topics[0].partitions[0], name, value)
    with pytest.raises(EncodeError) as failure:
        request.encode(version)
    assert failure.value.path == path


@pytest.mark.parametrize(
    ("topics", "path"),
    [(None, "topics"), ("abc", "topics"), ([None], "topics[0]"), ([1], "topics[0]"), (5, "topics")],
)
def test_wrong_lists(topics: Any, path: str) -> None:
    with pytest.raises(EncodeError) as failure:
        OffsetCommitRequest(topics=topics).encode(9)
    assert failure.value.path == path


def test_wrong_uuids_and_strings() -> None:
    topic = OffsetCommitRequest.OffsetCommitRequestTopic(topic_id=b"short")
    with pytest.raises(EncodeError, match=r"topics\[0\].topic_id"):
        OffsetCommitRequest(topics=[topic]).encode(10)
    with pytest.raises(EncodeError, match="subscribed_topic_names"):
        ConsumerGroupHeartbeatRequest(subscribed_topic_names="abc").encode(0)  # type: ignore[arg-type]
    with pytest.raises(EncodeError, match=r"group_id: null"):
        ConsumerGroupHeartbeatRequest(group_id=None).encode(0)  # type: ignore[arg-type]


def test_a_field_that_the_version_lacks() -> None:
    old = OffsetCommitRequest(group_id="g", group_instance_id="static")
    with pytest.raises(UnsupportedFieldError) as failure:
        old.encode(6)
    assert failure.value.path == "group_instance_id"
    assert isinstance(failure.value, EncodeError)
    assert OffsetCommitRequest.decode(old.encode(7), 7) == old
    ignorable = commit(committed_leader_epoch=4)
    decoded = OffsetCommitRequest.decode(ignorable.encode(5), 5)
    assert decoded.topics[0].partitions[0].committed_leader_epoch == -1
    with pytest.raises(UnsupportedFieldError, match="allow_auto_topic_creation"):
        MetadataRequest(topics=[], allow_auto_topic_creation=False).encode(0)


def test_null_is_encoded_only_if_the_version_allows_it() -> None:
    assert MetadataRequest(topics=None).encode(1) == b"\xff\xff\xff\xff"
    with pytest.raises(EncodeError, match="topics: null"):
        MetadataRequest(topics=None).encode(0)


def test_records_may_be_any_buffer() -> None:
    def produce(records: Any) -> bytes:
        partition = ProduceRequest.PartitionProduceData(index=0, records=records)
        topic = ProduceRequest.TopicProduceData(name="t", partition_data=[partition])
        return ProduceRequest(acks=-1, timeout_ms=1, topic_data=[topic]).encode(9)

    assert produce(bytearray(b"abc")) == produce(memoryview(b"abc")) == produce(b"abc")
    with pytest.raises(EncodeError, match="records"):
        produce("abc")


@pytest.mark.parametrize("version", [3, 9, 13])
@pytest.mark.parametrize("records", [b"", b"abc", bytes(300), None])
def test_records_of_a_request_are_a_view_of_its_frame(version: int, records: bytes | None) -> None:
    partition = ProduceRequest.PartitionProduceData(index=0, records=records)
    topic = ProduceRequest.TopicProduceData(name="t" if version < 13 else "", partition_data=[partition])
    request = ProduceRequest(acks=-1, timeout_ms=1, topic_data=[topic])
    frame = request.encode(version)
    decoded = ProduceRequest.decode(frame, version)
    assert decoded == request
    assert repr(decoded) == repr(request)
    view = decoded.topic_data[0].partition_data[0].records
    assert records is None or (isinstance(view, memoryview) and view.obj is frame)


def test_unknown_tagged_fields_are_kept() -> None:
    plain = ConsumerGroupHeartbeatRequest(group_id="g", member_id="m", member_epoch=5)
    encoded = plain.encode(0)
    assert encoded.endswith(b"\x00")
    tagged = encoded[:-1] + bytes.fromhex("02" + "8101" + "0161" + "05" + "00")
    message = ConsumerGroupHeartbeatRequest.decode(tagged, 0)
    assert message.unknown_tagged_fields == ((5, b""), (129, b"a"))
    assert message.encode(0) == encoded[:-1] + bytes.fromhex("02" + "0500" + "8101" + "0161")
    assert message != plain


def test_unknown_and_known_tags_are_written_in_one_order() -> None:
    leader = FetchResponse.LeaderIdAndEpoch(leader_id=1, leader_epoch=2)
    partition = FetchResponse.PartitionData(current_leader=leader, unknown_tagged_fields=((9, b"z"),))
    response = FetchResponse(
        responses=[FetchResponse.FetchableTopicResponse(partitions=[partition], unknown_tagged_fields=((0, b""),))]
    )
    encoded = response.encode(13)
    assert bytes.fromhex("02" + "0109" + "0000000100000002" + "00" + "0901" + "7a") in encoded
    assert FetchResponse.decode(encoded, 13) == response
    partition.unknown_tagged_fields = ((1, b""),)
    with pytest.raises(EncodeError, match=r"responses\[0\].partitions\[0\].unknown_tagged_fields"):
        response.encode(13)


def test_null_struct_in_a_tagged_field() -> None:
    value = ConsumerGroupMemberMetadataValue(classic_member_metadata=None)
    encoded = value.encode(0)
    assert encoded.endswith(bytes.fromhex("01" + "0001" + "00"))
    assert ConsumerGroupMemberMetadataValue.decode(encoded, 0) == value


def test_bytes_written_by_hand() -> None:
    fetch = OffsetFetchRequest(
        group_id="g", topics=[OffsetFetchRequest.OffsetFetchRequestTopic(name="t", partition_indexes=[0, 258])]
    )
    assert fetch.encode(1).hex() == "000167" + "00000001" + "000174" + "00000002" + "00000000" + "00000102"
    assert fetch.encode(6).hex() == "0267" + "02" + "0274" + "03" + "00000000" + "00000102" + "00" + "00"
    heartbeat = ConsumerGroupHeartbeatRequest(
        group_id="g", member_id="m", member_epoch=5, subscribed_topic_names=["t"], topic_partitions=[]
    )
    assert heartbeat.encode(1).hex() == (
        "0267" + "026d" + "00000005" + "00" + "00" + "ffffffff" + "02" + "0274" + "00" + "00" + "01" + "00"
    )
    update = UpdateFeaturesRequest(timeout_ms=1, feature_updates=[])
    assert update.encode(1).hex() == "00000001" + "01" + "00" + "00"
