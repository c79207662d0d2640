# SPDX-License-Identifier: Apache-2.0
"""Names a partition in a cluster. Readers of folders import nothing else of this package, and so no client."""

from __future__ import annotations

from dataclasses import dataclass, field

Properties = tuple[tuple[str, str], ...]
"""Settings of Kafka's clients, as sorted pairs. Values may be secrets."""


@dataclass(frozen=True, slots=True)
class BrokerPartition:
    """A partition of the topic in a cluster, with its offsets at the time of the listing.

    Spark pickles it and sends it to the workers.
    """

    log_partition: int
    topic: str
    topic_id: bytes
    properties: Properties = field(repr=False)
    start_offset: int
    end_offset: int
    size_bytes: int | None = None
    """The size of the log; None if the broker does not tell it."""
    fail_on_data_loss: bool = True

    def __str__(self) -> str:
        return f"{self.topic}-{self.log_partition}"
