# SPDX-License-Identifier: Apache-2.0
"""The requests that a rude client sends as a transactional producer."""

from __future__ import annotations

from random import Random
from typing import Final

from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import (
    AddOffsetsToTxnRequest,
    DescribeTransactionsRequest,
    EndTxnRequest,
    InitProducerIdRequest,
    InitProducerIdResponse,
    Message,
    TxnOffsetCommitRequest,
)

_MEMBERS_SINCE: Final = 3
_INIT_VERSION: Final = 4
_IDS: Final = ("rude-tx", "rude-tx", "rude-tx", "no-tx", "")


def producer_of(body: bytes) -> tuple[int, int] | None:
    """Returns producer id and epoch of an InitProducerId response, or None if it is an error."""
    response = InitProducerIdResponse.decode(body, _INIT_VERSION)
    return None if response.error_code else (response.producer_id, response.producer_epoch)


def trick(
    random: Random, group_id: str, member_id: str, epoch: int, producer: tuple[int, int]
) -> tuple[ApiKey, int, Message]:
    """Returns one random request: API key, version and message."""
    transactional_id = random.choice(_IDS)
    producer_id, producer_epoch = producer
    producer_id += random.choice((0,) * 9 + (1,))
    producer_epoch = max(producer_epoch + random.choice((0,) * 6 + (-1, 1)), 0)
    match random.choice(("init", "init", "add", "add", "commit", "commit", "commit", "end", "end", "end", "describe")):
        case "init":
            timeout_ms = random.choice((1_500, 8_000, 8_000, 0, 2**31 - 1))
            request = InitProducerIdRequest(transactional_id=transactional_id, transaction_timeout_ms=timeout_ms)
            if random.random() < 0.3:
                request.producer_id, request.producer_epoch = producer_id, producer_epoch
            return ApiKey.INIT_PRODUCER_ID, random.choice((3, _INIT_VERSION)), request
        case "add":
            added = AddOffsetsToTxnRequest(
                transactional_id=transactional_id,
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                group_id=group_id,
            )
            return ApiKey.ADD_OFFSETS_TO_TXN, random.choice((1, 3)), added
        case "commit":
            return _commit(random, transactional_id, group_id, member_id, epoch, (producer_id, producer_epoch))
        case "end":
            end = EndTxnRequest(
                transactional_id=transactional_id,
                producer_id=producer_id,
                producer_epoch=producer_epoch,
                committed=random.random() < 0.5,
            )
            return ApiKey.END_TXN, random.choice((1, 3, 5)), end
        case _:
            ids = [transactional_id, "no-tx", ""]
            return ApiKey.DESCRIBE_TRANSACTIONS, 0, DescribeTransactionsRequest(transactional_ids=ids)


def _commit(
    random: Random, transactional_id: str, group_id: str, member_id: str, epoch: int, producer: tuple[int, int]
) -> tuple[ApiKey, int, Message]:
    names_member = random.random() < 0.8
    metadata = random.choice(("", "", "x" * 5_000))
    partition = TxnOffsetCommitRequest.TxnOffsetCommitRequestPartition(
        partition_index=random.randint(0, 2), committed_offset=5, committed_metadata=metadata
    )
    request = TxnOffsetCommitRequest(
        transactional_id=transactional_id,
        group_id=group_id,
        producer_id=producer[0],
        producer_epoch=producer[1],
        topics=[TxnOffsetCommitRequest.TxnOffsetCommitRequestTopic(name="topic-0", partitions=[partition])],
    )
    version = random.choice((1, 3, 3, 5, 5))
    if random.random() < 0.05:
        request.group_id = ""
    if names_member and version >= _MEMBERS_SINCE:
        request.member_id, request.generation_id_or_member_epoch = member_id, epoch
    return ApiKey.TXN_OFFSET_COMMIT, version, request
