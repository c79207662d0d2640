# SPDX-License-Identifier: Apache-2.0
"""Kafka's error codes, and the exceptions of this package.

`KafkaError` is an expected failure that a response reports to a client. `DecodeError` and `EncodeError` name the wrong
field.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Final


class Errors(IntEnum):
    """Every error code of Kafka, and one for KIP-848 that Kafka lacks.

    `retriable`: the client may send the same request again.
    """

    retriable: bool
    description: str

    def __new__(cls, code: int, retriable: bool = False, description: str = "") -> Errors:
        """Make a member whose value is `code`. The other parts of the tuple become attributes."""
        member = int.__new__(cls, code)
        member._value_ = code
        member.retriable = retriable
        member.description = description
        return member

    UNKNOWN_SERVER_ERROR = -1, False, "The broker failed in a way that has no code of its own."
    NONE = 0, False, "Success."
    OFFSET_OUT_OF_RANGE = 1, False, "The partition holds no record at that offset."
    CORRUPT_MESSAGE = 2, True, "The records are corrupt: the checksum, a length or the content does not match."
    UNKNOWN_TOPIC_OR_PARTITION = 3, True, "This server does not host this topic-partition."
    INVALID_FETCH_SIZE = 4, False, "The fetch size is not a usable number."
    LEADER_NOT_AVAILABLE = 5, True, "The partition has no leader at the moment."
    NOT_LEADER_OR_FOLLOWER = 6, True, "This broker does not serve the partition in the role asked for."
    REQUEST_TIMED_OUT = 7, True, "The time allowed for the request ran out."
    BROKER_NOT_AVAILABLE = 8, False, "The broker cannot be reached."
    REPLICA_NOT_AVAILABLE = 9, True, "The replica asked for cannot be used."
    MESSAGE_TOO_LARGE = 10, False, "A record batch is larger than the topic accepts."
    STALE_CONTROLLER_EPOCH = 11, False, "The request has an old controller epoch."
    OFFSET_METADATA_TOO_LARGE = 12, False, "The metadata text of a committed offset is too long."
    NETWORK_EXCEPTION = 13, True, "The connection broke before an answer arrived."
    COORDINATOR_LOAD_IN_PROGRESS = 14, True, "The coordinator is still reading its log."
    COORDINATOR_NOT_AVAILABLE = 15, True, "No coordinator can serve this at the moment."
    NOT_COORDINATOR = 16, True, "Another broker is the coordinator."
    INVALID_TOPIC_EXCEPTION = 17, False, "The topic's name or use is not allowed."
    RECORD_LIST_TOO_LARGE = 18, False, "The batch is larger than a segment file may be."
    NOT_ENOUGH_REPLICAS = 19, True, "Too few replicas are in sync to accept the write."
    NOT_ENOUGH_REPLICAS_AFTER_APPEND = 20, True, "The write was stored, but on fewer replicas than required."
    INVALID_REQUIRED_ACKS = 21, False, "The number of acknowledgements asked for is not -1, 0 or 1."
    ILLEGAL_GENERATION = 22, False, "The generation is not the group's current one."
    INCONSISTENT_GROUP_PROTOCOL = 23, False, "The member's protocols do not fit those of the group."
    INVALID_GROUP_ID = 24, False, "The group id is not acceptable."
    UNKNOWN_MEMBER_ID = 25, False, "The coordinator is not aware of this member."
    INVALID_SESSION_TIMEOUT = 26, False, "The session timeout lies outside the configured limits."
    REBALANCE_IN_PROGRESS = 27, False, "The group is rebalancing; the member has to join again."
    INVALID_COMMIT_OFFSET_SIZE = 28, False, "The commit is too large to be stored."
    TOPIC_AUTHORIZATION_FAILED = 29, False, "The client may not do this with the topic."
    GROUP_AUTHORIZATION_FAILED = 30, False, "The client may not do this with the group."
    CLUSTER_AUTHORIZATION_FAILED = 31, False, "The client may not do this to the cluster."
    INVALID_TIMESTAMP = 32, False, "A record's timestamp is outside the accepted range."
    UNSUPPORTED_SASL_MECHANISM = 33, False, "The broker does not offer this SASL mechanism."
    ILLEGAL_SASL_STATE = 34, False, "The request is not allowed in this phase of the authentication."
    UNSUPPORTED_VERSION = 35, False, "The broker does not support this version of the request."
    TOPIC_ALREADY_EXISTS = 36, False, "Topic with this name already exists."
    INVALID_PARTITIONS = 37, False, "The number of partitions is not possible."
    INVALID_REPLICATION_FACTOR = 38, False, "The replication factor is not positive or exceeds the number of brokers."
    INVALID_REPLICA_ASSIGNMENT = 39, False, "The replica assignment is not possible."
    INVALID_CONFIG = 40, False, "A configuration name or value is not acceptable."
    NOT_CONTROLLER = 41, True, "This broker is not the controller."
    INVALID_REQUEST = 42, False, (
        "This most likely occurs because of a request being malformed by the client library or the message was sent "
        "to an incompatible broker. See the broker logs for more details."
    )  # fmt: skip
    UNSUPPORTED_FOR_MESSAGE_FORMAT = 43, False, "The stored message format is too old for this."
    POLICY_VIOLATION = 44, False, "A policy of the cluster forbids the request."
    OUT_OF_ORDER_SEQUENCE_NUMBER = 45, False, "The producer's sequence number leaves a gap or goes back."
    DUPLICATE_SEQUENCE_NUMBER = 46, False, "The producer's sequence number has been seen before."
    INVALID_PRODUCER_EPOCH = 47, False, "The producer's epoch is older than the known one."
    INVALID_TXN_STATE = 48, False, "The transaction is not in a state that allows this."
    INVALID_PRODUCER_ID_MAPPING = 49, False, "The producer id does not belong to the transactional id."
    INVALID_TRANSACTION_TIMEOUT = 50, False, "The transaction timeout exceeds what the broker allows."
    CONCURRENT_TRANSACTIONS = 51, True, "An earlier operation on the same transaction has not finished."
    TRANSACTION_COORDINATOR_FENCED = 52, False, "The transaction coordinator has been replaced by a newer one."
    TRANSACTIONAL_ID_AUTHORIZATION_FAILED = 53, False, "The client may not use the transactional id."
    SECURITY_DISABLED = 54, False, "The broker runs without the security feature needed."
    OPERATION_NOT_ATTEMPTED = 55, False, "The operation was not attempted, because another part of the request failed."
    KAFKA_STORAGE_ERROR = 56, True, "The disk failed to read or write."
    LOG_DIR_NOT_FOUND = 57, False, "The user-specified log directory is not found in the broker config."
    SASL_AUTHENTICATION_FAILED = 58, False, "The broker rejected the credentials."
    UNKNOWN_PRODUCER_ID = 59, False, "The broker has no state for the producer id."
    REASSIGNMENT_IN_PROGRESS = 60, False, "The partition is being moved already."
    DELEGATION_TOKEN_AUTH_DISABLED = 61, False, "Delegation tokens are switched off."
    DELEGATION_TOKEN_NOT_FOUND = 62, False, "The delegation token is not found on the server."
    DELEGATION_TOKEN_OWNER_MISMATCH = 63, False, "The delegation token belongs to another owner."
    DELEGATION_TOKEN_REQUEST_NOT_ALLOWED = 64, False, "Delegation tokens cannot be asked for over this connection."
    DELEGATION_TOKEN_AUTHORIZATION_FAILED = 65, False, "The client may not handle the delegation token."
    DELEGATION_TOKEN_EXPIRED = 66, False, "The delegation token has expired."
    INVALID_PRINCIPAL_TYPE = 67, False, "The kind of principal is not supported."
    NON_EMPTY_GROUP = 68, False, "The group is not empty."
    GROUP_ID_NOT_FOUND = 69, False, "The group id does not exist."
    FETCH_SESSION_ID_NOT_FOUND = 70, True, "The fetch session does not exist."
    INVALID_FETCH_SESSION_EPOCH = 71, True, "The fetch session has another epoch."
    LISTENER_NOT_FOUND = 72, True, "The leader has no listener with the name of the listener that received the request."
    TOPIC_DELETION_DISABLED = 73, False, "The broker is configured not to delete topics."
    FENCED_LEADER_EPOCH = 74, True, "The request names an older leader epoch than the current one."
    UNKNOWN_LEADER_EPOCH = 75, True, "The request names a leader epoch that this broker has not seen yet."
    UNSUPPORTED_COMPRESSION_TYPE = 76, False, "The client cannot read records compressed in this way."
    STALE_BROKER_EPOCH = 77, False, "The broker's registration has been replaced."
    OFFSET_NOT_AVAILABLE = 78, True, "The new leader does not know its latest offset yet."
    MEMBER_ID_REQUIRED = 79, False, "The member has to join again with the id it was given."
    PREFERRED_LEADER_NOT_AVAILABLE = 80, True, "The preferred leader is not available."
    GROUP_MAX_SIZE_REACHED = 81, False, "The group has its maximum number of members."
    FENCED_INSTANCE_ID = 82, False, "Another member has taken over the group instance id."
    ELIGIBLE_LEADERS_NOT_AVAILABLE = 83, True, "No replica that may lead is available."
    ELECTION_NOT_NEEDED = 84, True, "Leader election not needed for topic partition."
    NO_REASSIGNMENT_IN_PROGRESS = 85, False, "The partition is not being moved."
    GROUP_SUBSCRIBED_TO_TOPIC = (
        86,
        False,
        "Deleting offsets of a topic is forbidden while the consumer group is actively subscribed to it.",
    )
    INVALID_RECORD = 87, False, "A record broke a rule of the topic and was rejected."
    UNSTABLE_OFFSET_COMMIT = 88, True, "A transaction that commits offsets is still open."
    THROTTLING_QUOTA_EXCEEDED = 89, True, "The client used up its quota; it should wait."
    PRODUCER_FENCED = 90, False, "A newer producer uses the same transactional id."
    RESOURCE_NOT_FOUND = 91, False, "The resource that the request names does not exist."
    DUPLICATE_RESOURCE = 92, False, "The resource already exists, or the request names it twice."
    UNACCEPTABLE_CREDENTIAL = 93, False, "The credential does not meet the requirements."
    INCONSISTENT_VOTER_SET = 94, False, "The two sides disagree about the set of voters."
    INVALID_UPDATE_VERSION = 95, False, "The version to update to is not possible."
    FEATURE_UPDATE_FAILED = 96, False, "A feature could not be changed."
    PRINCIPAL_DESERIALIZATION_FAILURE = 97, False, "The forwarded principal could not be read."
    SNAPSHOT_NOT_FOUND = 98, False, "The snapshot does not exist."
    POSITION_OUT_OF_RANGE = 99, False, "The position lies outside the snapshot."
    UNKNOWN_TOPIC_ID = 100, True, "This server does not host this topic ID."
    DUPLICATE_BROKER_REGISTRATION = 101, False, "A broker with that id is registered and alive."
    BROKER_ID_NOT_REGISTERED = 102, False, "No broker with that id is registered."
    INCONSISTENT_TOPIC_ID = 103, True, "The log on disk has another topic id than the request."
    INCONSISTENT_CLUSTER_ID = 104, False, "The request is meant for another cluster."
    TRANSACTIONAL_ID_NOT_FOUND = 105, False, "The transactional id could not be found."
    FETCH_SESSION_TOPIC_ID_ERROR = 106, True, "The fetch session mixes requests with and without topic ids."
    INELIGIBLE_REPLICA = 107, False, "The replica may not join the in-sync set."
    NEW_LEADER_ELECTED = 108, False, "The change gave the partition a new leader."
    OFFSET_MOVED_TO_TIERED_STORAGE = 109, False, "The offset is held by the remote storage tier only."
    FENCED_MEMBER_EPOCH = (
        110,
        False,
        "The member's epoch is not valid; it has to give up its partitions and join again.",
    )
    UNRELEASED_INSTANCE_ID = 111, False, "A live member of the group still holds the instance id."
    UNSUPPORTED_ASSIGNOR = 112, False, "The group cannot use the assignor asked for."
    STALE_MEMBER_EPOCH = 113, False, "The member's epoch is behind; try again after the next heartbeat."
    MISMATCHED_ENDPOINT_TYPE = 114, False, "The request reached an endpoint of the wrong kind."
    UNSUPPORTED_ENDPOINT_TYPE = 115, False, "This kind of endpoint is not supported."
    UNKNOWN_CONTROLLER_ID = 116, False, "No controller has that id."
    UNKNOWN_SUBSCRIPTION_ID = 117, False, "The client's telemetry subscription is out of date."
    TELEMETRY_TOO_LARGE = 118, False, "The client sent more telemetry than is accepted."
    INVALID_REGISTRATION = 119, False, "The registration contradicts the cluster's settings."
    TRANSACTION_ABORTABLE = 120, False, "The transaction can only be aborted now."
    INVALID_RECORD_STATE = 121, False, "The record is not in a delivery state that allows this."
    SHARE_SESSION_NOT_FOUND = 122, True, "The share session does not exist."
    INVALID_SHARE_SESSION_EPOCH = 123, True, "The share session has another epoch."
    FENCED_STATE_EPOCH = 124, False, "The share state has moved on to a newer epoch."
    INVALID_VOTER_KEY = 125, False, "The voter's key does not match the receiver."
    DUPLICATE_VOTER = 126, False, "The voter is in the set already."
    VOTER_NOT_FOUND = 127, False, "The set has no such voter."
    INVALID_REGULAR_EXPRESSION = 128, False, "The regular expression cannot be used."
    REBOOTSTRAP_REQUIRED = 129, False, "The client's view of the cluster is too old; it has to bootstrap again."
    STREAMS_INVALID_TOPOLOGY = 130, False, "The streams topology is not possible."
    STREAMS_INVALID_TOPOLOGY_EPOCH = 131, False, "The streams topology has another epoch."
    STREAMS_TOPOLOGY_FENCED = 132, False, "The streams topology has been replaced by a newer one."
    SHARE_SESSION_LIMIT_REACHED = 133, True, "The broker holds as many share sessions as it can."
    GROUP_DELETION_FAILED = 134, False, "The group could not be deleted; the error message of its result says why."
    STREAMS_TOPOLOGY_DESCRIPTION_UPDATE_FAILED = 135, False, "The broker could not process the topology description."
    CONTROLLER_ID_NOT_REGISTERED = 136, False, "No controller is registered with that id."
    INVALID_ASSIGNMENT = 10_000, False, "The assignment that the member computed cannot be installed."


MAX_MESSAGE_CHARACTERS: Final = 8_000
"""The limit of error messages. A string of a response has at most 32,767 bytes, and a character up to four."""


def shortened(text: str) -> str:
    """Returns the text, cut so that any response can carry it. It may contain a name of any length from a request."""
    return text if len(text) <= MAX_MESSAGE_CHARACTERS else text[:MAX_MESSAGE_CHARACTERS] + "..."


class KafkaError(Exception):
    """An expected failure. The response carries `error` and, if the API has a field for it, `message`.

    Longer messages than a response can carry are cut.
    """

    def __init__(self, error: Errors, message: str | None = None) -> None:
        if message is not None:
            message = shortened(message)
        super().__init__(error, message)
        self.error = error
        self.message = message

    def __str__(self) -> str:
        return f"{self.error.name}: {self.message or self.error.description}"


class ProtocolError(ValueError):
    """Bytes or a message that the protocol does not allow. `path` names the field, "" if no field is known."""

    def __init__(self, reason: str, path: str = "") -> None:
        super().__init__(reason, path)
        self.reason = reason
        self.path = path

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.path else self.reason


class DecodeError(ProtocolError):
    """The bytes are malformed."""


class EncodeError(ProtocolError):
    """A message cannot be encoded."""


class UnsupportedVersionError(ProtocolError):
    """The message does not exist in that version."""


class UnsupportedFieldError(EncodeError, UnsupportedVersionError):
    """A field is set that the version lacks, and leaving it out would lose information."""


class FramingError(DecodeError):
    """A length prefix is impossible. `frames` are the complete frames that were received before it."""

    def __init__(self, reason: str, frames: list[bytes] | None = None) -> None:
        super().__init__(reason)
        self.frames = frames or []


class CorruptBatchError(DecodeError):
    """A record batch is corrupt or contradicts itself.

    `position` is the byte where the corrupt batch or record begins in the bytes that were read. `base_offset` is the
    base offset of the batch. Both are -1 if they are unknown.
    """

    def __init__(self, reason: str, path: str = "", *, position: int = -1, base_offset: int = -1) -> None:
        super().__init__(reason, path)
        self.position = position
        self.base_offset = base_offset


class UnsupportedMagicError(CorruptBatchError):
    """Records of format 0 or 1, which Kafka 4 no longer accepts, or of a format that does not exist."""


class BatchTooLargeError(CorruptBatchError):
    """The records of a compressed batch exceed the limit, or a ratio that no ordinary batch reaches."""
