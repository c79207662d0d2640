# SPDX-License-Identifier: Apache-2.0
"""The checkers that members report to, and the topics as a client's metadata shows them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from kcoord.metadata.image import MetadataImage
from kcoord.simulation.checkers import AcknowledgedCommits, PartitionOwners, ToldEpochs
from kcoord.simulation.client import RETRIABLE, SimulatedClient
from kcoord.simulation.observer import CommitKey
from kcoord.simulation.trace import Trace
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import OffsetCommitResponse

_COMMIT_REFUSED: Final = frozenset(
    {
        Errors.STALE_MEMBER_EPOCH,
        Errors.UNKNOWN_MEMBER_ID,
        Errors.ILLEGAL_GENERATION,
        Errors.REBALANCE_IN_PROGRESS,
        Errors.FENCED_INSTANCE_ID,
        Errors.GROUP_ID_NOT_FOUND,
        Errors.UNKNOWN_TOPIC_OR_PARTITION,
    }
)


@dataclass(slots=True)
class PromisedSubscription:
    """A subscription of a member: topic names, or a regular expression ("" for none)."""

    names: list[str]
    regex: str = ""

    def covers(self, topic: str) -> bool:
        return topic in self.names or bool(self.regex and re.fullmatch(self.regex, topic))


@dataclass(slots=True)
class Promises:
    """The checkers that members report to, and the topics as a client's metadata shows them.

    Members read topics from the broker's image instead of sending Metadata requests.
    """

    trace: Trace
    ownership: PartitionOwners
    epochs: ToldEpochs
    commits: AcknowledgedCommits
    image: Callable[[], MetadataImage]
    names: dict[bytes, str] = field(default_factory=dict)
    """Names of all topics that ever existed, by id."""

    def topic_name(self, topic_id: bytes) -> str:
        return self.names[topic_id]

    def topic_id(self, name: str) -> bytes | None:
        topic = self.image().topics.get(name)
        return topic.id if topic is not None else None

    def partitions_of(self, name: str) -> int:
        topic = self.image().topics.get(name)
        return len(topic.partitions) if topic is not None else 0

    def topics_of(self, subscription: PromisedSubscription) -> dict[str, int]:
        """Returns the existing topics that the subscription covers, with their numbers of partitions."""
        topics = self.image().topics
        return {name: len(topic.partitions) for name, topic in sorted(topics.items()) if subscription.covers(name)}

    def on_committed(self, client: SimulatedClient, group_id: str, response: OffsetCommitResponse, offset: int) -> None:
        """Takes the response to a member's commit of `offset`. Raises ViolationError on an unexpected error."""
        for topic in response.topics:
            for partition in topic.partitions:
                error = partition.error_code
                if error in _COMMIT_REFUSED:
                    self.trace.add("commit-refused", client.name)
                elif error == Errors.NONE:
                    self.commits.acknowledge(CommitKey(group_id, topic.name, partition.partition_index), offset)
                elif error not in RETRIABLE:
                    raise client.unexpected(error, "OffsetCommit")
