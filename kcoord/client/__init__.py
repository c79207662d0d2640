# SPDX-License-Identifier: Apache-2.0
"""An asyncio client for Kafka brokers: AdminClient, Consumer (KIP-848, KIP-1327) and Producer.

`KafkaError` is what a broker or the network says, `ClientException` what the client says itself.
"""

from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.group_offsets import DeleteConsumerGroupOffsetsResult
from kcoord.client.admin.model import (
    AclOperation,
    AlterConfigOp,
    AlterConfigOpType,
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
from kcoord.client.config import AdminConfig, ConsumerConfig, ProducerConfig
from kcoord.client.consumer.client import Consumer
from kcoord.client.consumer.listener import ConsumerRebalanceListener
from kcoord.client.errors import (
    ClientException,
    CommitFailedException,
    ConfigException,
    DisconnectException,
    IllegalStateException,
    NoOffsetForPartitionException,
    OffsetOutOfRangeException,
    RecordTooLargeException,
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
from kcoord_protocol.errors import Errors, KafkaError

__all__ = [
    "AclOperation",
    "AdminClient",
    "AdminConfig",
    "AlterConfigOp",
    "AlterConfigOpType",
    "ClientException",
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
    "DeleteConsumerGroupOffsetsResult",
    "DisconnectException",
    "Errors",
    "FeatureMetadata",
    "FeatureUpdate",
    "GroupListing",
    "IllegalStateException",
    "KafkaError",
    "ListOffsetsResult",
    "MemberDescription",
    "NewPartitions",
    "NewTopic",
    "NoOffsetForPartitionException",
    "Node",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "OffsetOutOfRangeException",
    "OffsetSpec",
    "Producer",
    "ProducerConfig",
    "RecordMetadata",
    "RecordTooLargeException",
    "RequestSender",
    "Results",
    "Security",
    "TimeoutException",
    "TopicDescription",
    "TopicListing",
    "TopicPartition",
    "TopicPartitionInfo",
    "TransactionAbortedException",
    "UnsupportedVersionException",
    "UpgradeType",
]
