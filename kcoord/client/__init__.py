# SPDX-License-Identifier: Apache-2.0
"""An asyncio client for Kafka brokers: AdminClient, Consumer (KIP-848, KIP-1327) and Producer.

`KafkaError` is an error of a broker or of the network. `ClientException` is an error of the client itself.
"""

from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.client_quotas import ClientQuotaEntity
from kcoord.client.admin.delegation_tokens import DelegationToken
from kcoord.client.admin.group_offsets import DeleteConsumerGroupOffsetsResult
from kcoord.client.admin.model import (
    AlterConfigOp,
    AlterConfigOpType,
    AssignmentMetadata,
    ClusterDescription,
    ConfigEntry,
    ConfigResource,
    ConfigResourceType,
    ConfigSource,
    ConfigSynonym,
    ConsumerGroupDescription,
    CreatedTopic,
    FeatureMetadata,
    FeatureUpdate,
    GroupListing,
    MemberDescription,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    TopicDescription,
    TopicListing,
    TopicPartitionInfo,
    UpgradeType,
)
from kcoord.client.admin.scram_credentials import (
    ScramCredentialInfo,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from kcoord.client.assignors import (
    AssignmentMemberSpec,
    AssignmentSpec,
    AssignmentTopicMetadata,
    AssignorMetadata,
    GroupAssignment,
    MemberAssignment,
    Metadata,
    OfferedAssignor,
    PartitionAssignor,
)
from kcoord.client.assignors.lag import LagAssignor
from kcoord.client.config import AdminConfig, ConsumerConfig, ProducerConfig
from kcoord.client.consumer.client import Consumer
from kcoord.client.consumer.listener import ConsumerRebalanceListener
from kcoord.client.errors import (
    AssignorException,
    ClientException,
    CommitFailedException,
    ConfigException,
    DisconnectException,
    IllegalStateException,
    NoOffsetForPartitionException,
    OffsetOutOfRangeException,
    RecordTooLargeException,
    SslAuthenticationException,
    TimeoutException,
    TransactionAbortedException,
    UnsupportedVersionException,
)
from kcoord.client.producer.client import Producer
from kcoord.client.results import Results
from kcoord.client.security import RequestSender, Security
from kcoord.client.types import (
    ConsumerGroupMetadata,
    ConsumerRecord,
    ListOffsetsResult,
    Node,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    RecordMetadata,
    TopicPartition,
)
from kcoord_protocol.acls import Acl, AclFilter, AclOperation, PatternType, PermissionType, ResourceType
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.scram_mechanisms import ScramMechanism

__all__ = [
    "Acl",
    "AclFilter",
    "AclOperation",
    "AdminClient",
    "AdminConfig",
    "AlterConfigOp",
    "AlterConfigOpType",
    "AssignmentMemberSpec",
    "AssignmentMetadata",
    "AssignmentSpec",
    "AssignmentTopicMetadata",
    "AssignorException",
    "AssignorMetadata",
    "ClientException",
    "ClientQuotaEntity",
    "ClusterDescription",
    "CommitFailedException",
    "ConfigEntry",
    "ConfigException",
    "ConfigResource",
    "ConfigResourceType",
    "ConfigSource",
    "ConfigSynonym",
    "Consumer",
    "ConsumerConfig",
    "ConsumerGroupDescription",
    "ConsumerGroupMetadata",
    "ConsumerRebalanceListener",
    "ConsumerRecord",
    "CreatedTopic",
    "DelegationToken",
    "DeleteConsumerGroupOffsetsResult",
    "DisconnectException",
    "Errors",
    "FeatureMetadata",
    "FeatureUpdate",
    "GroupAssignment",
    "GroupListing",
    "IllegalStateException",
    "KafkaError",
    "LagAssignor",
    "ListOffsetsResult",
    "MemberAssignment",
    "MemberDescription",
    "Metadata",
    "NewPartitions",
    "NewTopic",
    "NoOffsetForPartitionException",
    "Node",
    "OfferedAssignor",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "OffsetOutOfRangeException",
    "OffsetSpec",
    "PartitionAssignor",
    "PatternType",
    "PermissionType",
    "Producer",
    "ProducerConfig",
    "RecordMetadata",
    "RecordTooLargeException",
    "RequestSender",
    "ResourceType",
    "Results",
    "ScramCredentialInfo",
    "ScramMechanism",
    "Security",
    "SslAuthenticationException",
    "TimeoutException",
    "TopicDescription",
    "TopicListing",
    "TopicPartition",
    "TopicPartitionInfo",
    "TransactionAbortedException",
    "UnsupportedVersionException",
    "UpgradeType",
    "UserScramCredentialDeletion",
    "UserScramCredentialUpsertion",
]
