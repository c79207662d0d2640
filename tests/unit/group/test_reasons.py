# SPDX-License-Identifier: Apache-2.0
"""The reasons in the log: each tombstone has a record header, and each group epoch a tagged field."""

from __future__ import annotations

import pytest

from kcoord.config import BrokerConfig
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.result import OperationContext
from kcoord.runtime.serde import PRINCIPAL_HEADER, REASON_HEADER, CoordinatorSerde
from kcoord.runtime.shard_set import ShardSet
from kcoord_protocol.record_batch import decode_records
from tests.unit.group.group_context import GroupContext
from tests.unit.group.images import image_of


@pytest.mark.parametrize(("principal", "by"), [("User:Jürgen", [(PRINCIPAL_HEADER, "User:Jürgen".encode())]), ("", [])])
def test_the_reason_and_the_principal_are_record_headers(principal: str, by: list[tuple[str, bytes]]) -> None:
    shard = GroupCoordinatorShard(BrokerConfig.from_properties({}), image_of({"t3": 3}, 1))
    runtime = ShardSet(lambda _: shard, CoordinatorSerde())
    runtime.load(0, (), 0)
    context = GroupContext({"t3": 3})
    context.shard = shard
    context.commit("g", {"t3": {0: 1}})
    runtime.run(0, GroupCoordinatorShard.delete_groups, ["g"], OperationContext(5, token=1, principal=principal))
    (append,) = runtime.poll(5).appends
    records = decode_records(append.data)
    assert [record.value for record in records] == [None, None]
    assert [record.headers for record in records] == [[(REASON_HEADER, b"group-delete"), *by]] * 2
    assert {record.timestamp_ms for record in records} == {5}
