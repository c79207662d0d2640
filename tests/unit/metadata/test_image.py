# SPDX-License-Identifier: Apache-2.0
"""Replay of metadata records: images never change, rebuild(log) == live, unknown records are skipped."""

from __future__ import annotations

from dataclasses import replace

from kcoord.metadata import records
from kcoord.metadata.image import GROUP_RESOURCE, TOPIC_RESOURCE, ImageBuilder, MetadataImage, ScramCredential
from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.acls import Acl, AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.messages import (
    AccessControlEntryRecord,
    FeatureLevelRecord,
    NoOpRecord,
    PartitionChangeRecord,
    UnregisterBrokerRecord,
    UserScramCredentialRecord,
)
from kcoord_protocol.scram_mechanisms import ScramMechanism
from tests.unit.metadata.cluster import Cluster, Topic, registration

A, B = b"a" * 16, b"b" * 16


def built(image: MetadataImage, *records_: CoordinatorRecord) -> MetadataImage:
    builder = ImageBuilder(image)
    for record in records_:
        builder.replay(record)
    return builder.build()


def two_topics() -> MetadataImage:
    return ImageBuilder.of(
        [
            records.new_topic_record("a", A),
            records.new_config_record(TOPIC_RESOURCE, "a", "retention.ms", "5"),
            records.new_partition_record(A, 0, [1], [B], 100),
            records.new_partition_record(A, 1, [1], [B], 101),
            records.new_topic_record("b", B),
            records.new_partition_record(B, 0, [1], [B], 90),
        ]
    )


def test_topics_and_partitions() -> None:
    image = two_topics()
    assert list(image.topics) == ["a", "b"]
    assert image.topics_by_id[A] is image.topics["a"]
    partition = image.partition("a", 1)
    assert partition is not None
    assert (partition.leader, partition.leader_epoch, partition.replicas, partition.isr) == (1, 0, [1], [1])
    assert partition.creation_time_ms == 101
    assert image.partition("a", 2) is None
    assert image.partition("a", -1) is None
    assert image.partition("c", 0) is None
    assert image.last_creation_time_ms == 101
    assert image.topic_configs("a") == {"retention.ms": "5"}
    assert image.topic_configs("b") == {}


def test_an_image_never_changes() -> None:
    before = two_topics()
    after = built(
        before,
        records.new_partition_record(A, 2, [1], [B], 102),
        records.new_config_record(TOPIC_RESOURCE, "a", "retention.ms", None),
        records.new_config_record(TOPIC_RESOURCE, "b", "retention.ms", "6"),
        records.new_remove_topic_record(B),
    )
    assert before == two_topics()
    assert after.epoch == before.epoch + 4
    assert len(after.topics["a"].partitions) == 3
    assert list(after.topics) == list({topic.name: topic for topic in after.topics_by_id.values()}) == ["a"]
    assert after.configs == {}


def test_without_records_the_image_is_the_same_object() -> None:
    image = two_topics()
    assert ImageBuilder(image).build() is image


def test_images_share_unchanged_topics() -> None:
    before = two_topics()
    after = built(before, records.new_partition_record(A, 2, [1], [B], 102))
    assert after.topics["b"] is before.topics["b"]
    assert after.topics["a"].partitions[0] is before.topics["a"].partitions[0]


def test_removing_a_topic_removes_its_configs_and_keeps_the_last_creation_time() -> None:
    image = built(two_topics(), records.new_remove_topic_record(A))
    assert image.topic_configs("a") == {}
    assert image.last_creation_time_ms == 101
    again = built(image, records.new_topic_record("a", b"c" * 16))
    assert again.topics["a"].partitions == []


def test_records_about_unknown_topics_and_brokers_are_skipped() -> None:
    before = two_topics()
    after = built(
        before,
        records.new_partition_record(b"x" * 16, 0, [1], [], 1),
        records.new_partition_record(A, 5, [1], [], 1),
        records.new_remove_topic_record(b"x" * 16),
        CoordinatorRecord(None, PartitionChangeRecord(topic_id=A, partition_id=7, leader=2)),
        CoordinatorRecord(None, NoOpRecord()),
        CoordinatorRecord(None, UnregisterBrokerRecord(broker_id=9)),
        records.new_config_record(TOPIC_RESOURCE, "x", "retention.ms", None),
    )
    assert after.topics == before.topics
    assert after.configs == before.configs


def test_partition_change() -> None:
    image = built(
        two_topics(),
        CoordinatorRecord(None, PartitionChangeRecord(topic_id=A, partition_id=0, leader=2, isr=[2], replicas=[2])),
        CoordinatorRecord(None, PartitionChangeRecord(topic_id=A, partition_id=1, isr=[])),
    )
    moved, shrunk = image.topics["a"].partitions
    assert (moved.leader, moved.leader_epoch, moved.partition_epoch, moved.isr) == (2, 1, 1, [2])
    assert (shrunk.leader, shrunk.leader_epoch, shrunk.partition_epoch, shrunk.isr) == (1, 0, 1, [])
    assert two_topics().topics["a"].partitions[0].leader == 1


def test_configs_of_all_kinds() -> None:
    image = ImageBuilder.of(
        [
            records.new_config_record(4, "", "message.max.bytes", "5"),
            records.new_config_record(4, "", "log.retention.ms", "7"),
            records.new_config_record(4, "1", "message.max.bytes", "6"),
            records.new_config_record(16, "cm", "interval.ms", "1000"),
            records.new_config_record(GROUP_RESOURCE, "h", "consumer.session.timeout.ms", "50000"),
            records.new_config_record(GROUP_RESOURCE, "g", "consumer.session.timeout.ms", "50000"),
        ]
    )
    assert image.effective_broker_configs(1) == {"message.max.bytes": "6", "log.retention.ms": "7"}
    assert image.effective_broker_configs(2) == {"message.max.bytes": "5", "log.retention.ms": "7"}
    assert image.group_configs("g") == {"consumer.session.timeout.ms": "50000"}
    assert image.client_metrics_configs("cm") == {"interval.ms": "1000"}
    assert image.resource_names(GROUP_RESOURCE) == ["g", "h"]


def test_delegation_tokens() -> None:
    token = records.DelegationTokenData("User:alice", "User:bob", ("User:carol",), 1, 9, 2)
    before = ImageBuilder.of(records.new_delegation_token_record(token_id, token) for token_id in ("a", "b"))
    after = built(
        before,
        records.new_delegation_token_record("a", token.expiring(20)),
        records.new_remove_delegation_token_record("b"),
        records.new_remove_delegation_token_record("unknown"),
    )
    assert before.delegation_tokens == {"a": token, "b": token}
    assert after.delegation_tokens == {"a": replace(token, expiry_ms=9)}
    unrelated = built(after, records.new_feature_level_record("group.version", 1))
    assert unrelated.delegation_tokens is after.delegation_tokens


def test_scram_credentials() -> None:
    sha_256, sha_512 = ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512
    before = ImageBuilder.of(
        [
            records.new_scram_credential_record(sha_256, "alice", b"salt", b"o" * 32, b"s" * 32, 4096),
            records.new_scram_credential_record(sha_256, "alice", b"salt", b"t" * 32, b"s" * 32, 8192),
            records.new_scram_credential_record(sha_512, "alice", b"SALT", b"T" * 64, b"S" * 64, 4096),
            records.new_scram_credential_record(sha_512, "bob", b"s", b"t" * 64, b"u" * 64, 4096),
            CoordinatorRecord(None, UserScramCredentialRecord(name="carol", mechanism=3)),
        ]
    )
    after = built(
        before,
        records.new_remove_scram_credential_record(sha_512, "bob"),
        records.new_remove_scram_credential_record(sha_256, "bob"),
    )
    assert before.scram_credentials == {
        ("SCRAM-SHA-256", "alice"): ScramCredential(b"salt", b"t" * 32, b"s" * 32, 8192),
        ("SCRAM-SHA-512", "alice"): ScramCredential(b"SALT", b"T" * 64, b"S" * 64, 4096),
        ("SCRAM-SHA-512", "bob"): ScramCredential(b"s", b"t" * 64, b"u" * 64, 4096),
    }
    assert after.scram_credentials.keys() == {("SCRAM-SHA-256", "alice"), ("SCRAM-SHA-512", "alice")}
    assert repr(ScramCredential(b"salt", b"stored", b"server", 8192)) == "ScramCredential(iterations=8192)"


def test_features_brokers_and_producer_ids() -> None:
    image = ImageBuilder.of(
        [
            records.new_feature_level_record("group.version", 1),
            records.new_feature_level_record("kraft.version", 1),
            CoordinatorRecord(None, FeatureLevelRecord(name="kraft.version", feature_level=0)),
            records.new_register_broker_record(registration(1, rack="r"), 4),
            records.new_register_broker_record(registration(2), 0),
            CoordinatorRecord(None, UnregisterBrokerRecord(broker_id=2)),
            records.new_producer_ids_record(1, 4, 1000),
        ]
    )
    assert image.features == {"group.version": 1}
    assert list(image.brokers) == [1]
    broker = image.brokers[1]
    assert (broker.broker_epoch, broker.rack, broker.fenced) == (4, "r", False)
    assert broker.endpoints == [("PLAINTEXT", "127.0.0.1", 9092, 0)]
    assert image.next_producer_id == 1000
    assert image.latest_producer_ids == (1, 4)


def test_racks_are_those_of_registered_brokers() -> None:
    cluster = Cluster()
    cluster.create(Topic(name="t", num_partitions=1, replication_factor=1))
    assert cluster.image.racks == {}
    cluster.register(registration(rack="r1"))
    assert cluster.image.racks == {1: "r1"}


def test_acls() -> None:
    acl = Acl(ResourceType.TOPIC, "a", PatternType.PREFIXED, "User:a", "*", AclOperation.READ, PermissionType.ALLOW)
    before = built(two_topics(), records.new_acl_record(A, acl))
    assert before.acls == {A: acl}
    unchanged = built(before, records.new_config_record(TOPIC_RESOURCE, "a", "retention.ms", "6"))
    assert unchanged.acls is before.acls
    after = built(before, records.new_acl_record(B, acl), records.new_remove_acl_record(A))
    assert (after.acls, before.acls) == ({B: acl}, {A: acl})
    assert built(after, records.new_remove_acl_record(A)).acls == after.acls


def test_an_acl_with_codes_of_a_later_release_is_kept() -> None:
    record = AccessControlEntryRecord(
        id=A, resource_type=99, resource_name="a", pattern_type=99, principal="U:a", host="*", operation=99
    )
    acl = built(two_topics(), CoordinatorRecord(None, record)).acls[A]
    assert (acl.resource_type, acl.operation) == (ResourceType.UNKNOWN, AclOperation.UNKNOWN)
    assert (acl.pattern_type, acl.permission_type) == (PatternType.UNKNOWN, PermissionType.UNKNOWN)
