# SPDX-License-Identifier: Apache-2.0
"""The actions of an upstream log: requests to the upstream, and outcomes for the shard set.

`kcoord.runtime.upstream_log` describes when the log makes which. A request is its own ticket.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kcoord.runtime.result import Producer
from kcoord.runtime.shard_log import Append, Load
from kcoord_protocol.errors import KafkaError
from kcoord_protocol.record_batch import BatchHeader


@dataclass(slots=True, eq=False)
class InitProducerId:
    """A request for the next epoch of the shard's transactional id. The answer is `initialized` or `refused`."""


@dataclass(slots=True, eq=False)
class Produce:
    """A request to append one batch with acks=all. The answer is `produced` or `refused`.

    The owner calls `may_send` right before it sends the request, and drops the request if that is False.
    """

    data: bytes = field(repr=False)
    created_ms: int
    transactional_id: str | None = None
    """Set if the batch is part of a client's transaction."""


@dataclass(slots=True, eq=False)
class Fetch:
    """A request for batches from `offset` on, up to the high watermark. The answer is `fetched` or `refused`."""

    offset: int


@dataclass(slots=True, eq=False)
class FindStart:
    """A request for the first offset of the partition. The answer is `found_start` or `refused`."""


@dataclass(slots=True, eq=False)
class Opened:
    """The log is claimed. All batches of earlier owners are below `end_offset`."""

    load: Load
    end_offset: int


@dataclass(slots=True, eq=False)
class Loaded:
    """The next batches of a load."""

    load: Load
    batches: Sequence[tuple[BatchHeader, bytes]]
    is_end: bool


@dataclass(slots=True, eq=False)
class Held:
    """The earlier owner may have appended while this load ran. The log has to be opened again."""

    load: Load


@dataclass(slots=True, eq=False)
class LoadFailed:
    """The log cannot be claimed or read."""

    load: Load
    reason: str


@dataclass(slots=True, eq=False)
class Written:
    """The batches of an append are in the log, on all in-sync replicas."""

    append: Append


@dataclass(slots=True, eq=False)
class Decided:
    """A transactional batch of an append is in the log, or (`error`) the upstream refused it and the append continues.

    `offset` is the base offset of the batch in the append.
    """

    append: Append
    offset: int
    error: KafkaError | None


@dataclass(slots=True, eq=False)
class Ended:
    """The log has a marker that ends the transaction of a client's producer."""

    producer: Producer
    coordinator_epoch: int
    committed: bool


@dataclass(slots=True, eq=False)
class Rewrite:
    """The values of these keys have to be written again, because the log has void records of them."""

    keys: Collection[bytes]


@dataclass(slots=True, eq=False)
class Unknown:
    """The batches of an append may be in the log or not."""

    append: Append
    reason: str


@dataclass(slots=True, eq=False)
class Fenced:
    """Another owner has claimed the log."""

    ticket: Append | Load


@dataclass(slots=True, eq=False)
class Lost:
    """The shard is not owned any more, and no append or load was in flight."""

    reason: str
    is_fenced: bool


Request: TypeAlias = InitProducerId | Produce | Fetch | FindStart
Outcome: TypeAlias = Opened | Loaded | Held | LoadFailed | Written | Decided | Ended | Rewrite | Unknown | Fenced | Lost
Action: TypeAlias = Request | Outcome
