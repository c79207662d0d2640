# SPDX-License-Identifier: Apache-2.0
"""What an audit log has of requests and responses: the fields and the errors, never a secret."""

from __future__ import annotations

import json
from typing import Any, cast

import pytest

from kcoord.server.observe.audited_requests import (
    CHANGES,
    MOST_PARTS,
    errors_of,
    fields_of,
    is_change,
    is_commit_without_member,
)
from kcoord_protocol.api_keys import ApiKey, request_class
from kcoord_protocol.errors import Errors
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    AlterClientQuotasRequest,
    AlterUserScramCredentialsRequest,
    CreateAclsRequest,
    DeleteTopicsRequest,
    IncrementalAlterConfigsRequest,
    LeaveGroupRequest,
    OffsetCommitRequest,
    OffsetDeleteRequest,
    OffsetDeleteResponse,
    TxnOffsetCommitRequest,
)
from tests.protocol.samples import full_sample

TOPIC_ID = bytes(range(16))


def no_name(topic_id: bytes) -> str | None:
    return None


def strings(value: object) -> list[str]:
    """Returns the names of all fields in JSON."""
    if isinstance(value, dict):
        return [*value, *(name for part in value.values() for name in strings(part))]
    return [name for part in value for name in strings(part)] if isinstance(value, list) else []


@pytest.mark.parametrize("key", sorted({*CHANGES, ApiKey.OFFSET_COMMIT, ApiKey.LEAVE_GROUP}))
def test_no_request_leaves_a_secret(key: ApiKey) -> None:
    cls = request_class(key)
    for version in cls.valid_versions:
        fields = fields_of(key, full_sample(cls, version), no_name)
        assert fields, (key, version)
        assert not {"salt", "saltedPassword", "hmac", "timeoutMs"} & {*strings(fields)}
        assert ("value" in strings(fields)) == (key is ApiKey.ALTER_CLIENT_QUOTAS)
        json.dumps(fields)


def test_passwords_are_left_out() -> None:
    upsertion = AlterUserScramCredentialsRequest.ScramCredentialUpsertion(
        name="alice", mechanism=2, iterations=4096, salt=b"salty", salted_password=b"secret"
    )
    request = AlterUserScramCredentialsRequest(upsertions=[upsertion])
    assert fields_of(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, request, no_name) == {
        "upsertions": [{"name": "alice", "mechanism": "SCRAM-SHA-512", "iterations": 4096}]
    }
    config = IncrementalAlterConfigsRequest.AlterableConfig(name="ssl.key.password", config_operation=0, value="pw")
    resource = IncrementalAlterConfigsRequest.AlterConfigsResource(resource_type=4, resource_name="1", configs=[config])
    assert fields_of(
        ApiKey.INCREMENTAL_ALTER_CONFIGS, IncrementalAlterConfigsRequest(resources=[resource]), no_name
    ) == {
        "resources": [
            {
                "resourceType": "BROKER",
                "resourceName": "1",
                "configs": [{"name": "ssl.key.password", "configOperation": "SET"}],
            }
        ],
        "validateOnly": False,
    }


def test_codes_have_their_names_and_topics_too() -> None:
    creation = CreateAclsRequest.AclCreation(
        resource_type=3,
        resource_name="g",
        resource_pattern_type=4,
        principal="User:alice",
        host="*",
        operation=6,
        permission_type=2,
    )
    fields = fields_of(ApiKey.CREATE_ACLS, CreateAclsRequest(creations=[creation]), no_name)
    assert fields["creations"] == [
        {
            "resourceType": "GROUP",
            "resourceName": "g",
            "resourcePatternType": "PREFIXED",
            "principal": "User:alice",
            "host": "*",
            "operation": "DELETE",
            "permissionType": "DENY",
        }
    ]
    deletion = DeleteTopicsRequest(topics=[DeleteTopicsRequest.DeleteTopicState(topic_id=TOPIC_ID)])
    fields = fields_of(ApiKey.DELETE_TOPICS, deletion, {TOPIC_ID: "orders"}.get)
    assert fields == {"topics": [{"topicId": "AAECAwQFBgcICQoLDA0ODw", "name": "orders"}]}
    quota = AlterClientQuotasRequest.OpData(key="producer_byte_rate", value=5.0, remove=False)
    entry = AlterClientQuotasRequest.EntryData(ops=[quota])
    assert fields_of(ApiKey.ALTER_CLIENT_QUOTAS, AlterClientQuotasRequest(entries=[entry]), no_name) == {
        "entries": [{"ops": [{"key": "producer_byte_rate", "value": 5.0, "remove": False}]}],
        "validateOnly": False,
    }


def leave(member_id: str, reason: str | None) -> Message:
    member = LeaveGroupRequest.MemberIdentity(member_id=member_id, group_instance_id="i", reason=reason)
    return LeaveGroupRequest(group_id="g", members=[member])


@pytest.mark.parametrize(
    ("member_id", "reason", "expected"),
    [
        ("", None, True),
        ("m", "member was removed by an admin: it hangs", True),
        ("m", "the consumer is being closed", False),
        ("m", None, False),
    ],
)
def test_only_an_administrator_removes_other_members(member_id: str, reason: str | None, expected: bool) -> None:
    assert is_change(ApiKey.LEAVE_GROUP, leave(member_id, reason)) is expected


@pytest.mark.parametrize("request_class", [OffsetCommitRequest, TxnOffsetCommitRequest])
@pytest.mark.parametrize(("generation", "expected"), [(-1, True), (0, False), (7, False)])
def test_only_clients_without_a_generation_are_no_members(
    request_class: type[OffsetCommitRequest | TxnOffsetCommitRequest], generation: int, expected: bool
) -> None:
    request = request_class(group_id="g", generation_id_or_member_epoch=generation)
    assert is_commit_without_member(request) is expected
    assert not is_change(ApiKey(request.api_key), request)


def test_errors_name_their_resource() -> None:
    partition = OffsetDeleteResponse.OffsetDeleteResponsePartition(
        partition_index=3, error_code=Errors.GROUP_SUBSCRIBED_TO_TOPIC
    )
    good = OffsetDeleteResponse.OffsetDeleteResponsePartition(partition_index=4)
    topic = OffsetDeleteResponse.OffsetDeleteResponseTopic(name="orders", partitions=[partition, good])
    assert errors_of(OffsetDeleteResponse(topics=[topic])) == [
        {"name": "orders", "partitionIndex": 3, "error": "GROUP_SUBSCRIBED_TO_TOPIC"}
    ]
    assert errors_of(OffsetDeleteResponse(error_code=Errors.NON_EMPTY_GROUP)) == [{"error": "NON_EMPTY_GROUP"}]


def test_an_entry_has_a_limited_number_of_parts() -> None:
    """A client could otherwise fill the file with one request."""
    partitions = [OffsetDeleteRequest.OffsetDeleteRequestPartition(partition_index=p) for p in range(150)]
    topics = [OffsetDeleteRequest.OffsetDeleteRequestTopic(name=name, partitions=partitions) for name in "abc"]
    fields = fields_of(ApiKey.OFFSET_DELETE, OffsetDeleteRequest(group_id="g", topics=topics), no_name)
    first, second = cast("list[dict[str, Any]]", fields["topics"])
    assert (len(first["partitions"]), len(second["partitions"])) == (150, MOST_PARTS - 152)
    assert (second["partitionsLeftOut"], fields["topicsLeftOut"]) == (150 - (MOST_PARTS - 152), 1)
    failed = [
        OffsetDeleteResponse.OffsetDeleteResponsePartition(partition_index=p, error_code=Errors.NOT_COORDINATOR)
        for p in range(1_000)
    ]
    topic = OffsetDeleteResponse.OffsetDeleteResponseTopic(name="a", partitions=failed)
    errors = errors_of(OffsetDeleteResponse(topics=[topic]))
    assert [error["partitionIndex"] for error in errors] == [*range(MOST_PARTS)]
