# SPDX-License-Identifier: Apache-2.0
"""The requests of the control that concern groups: wait for a state, offsets, target assignments, sessions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final, TypeVar

from kcoord.server.replies import internal_operation_context
from kcoord.testing.arguments import Arguments
from kcoord.testing.errors import ControlError, WaitTimeout
from kcoord.testing.operations import ControllableShard

if TYPE_CHECKING:
    from kcoord.coordinator.group.shard import GroupCoordinatorShard
    from kcoord.runtime.result import CoordinatorResult, OperationContext
    from kcoord.testing.control_client import ControlClient
    from kcoord.testing.group_view import Group
    from kcoord.testing.host import BrokerHost
    from kcoord.testing.operations import TopicPartitions

T = TypeVar("T")

WAIT_MS: Final = 10_000
_LOOK_SECONDS: Final = 0.01


class GroupControl:
    """Executes control requests of groups. `connected` returns a client that is connected to the running broker."""

    def __init__(self, host: BrokerHost, connected: Callable[[], Awaitable[ControlClient]]) -> None:
        self._host = host
        self._connected = connected

    async def group(self, group_id: str, arguments: Arguments) -> object:
        """Returns the group, after it has the requested state and number of members."""
        state, members = arguments.text("state", None), arguments.number("members", None)
        timeout_ms = arguments.number("timeout_ms", WAIT_MS)
        arguments.end()
        client = await self._connected()
        group = await client.group(group_id)

        async def is_reached() -> bool:
            nonlocal group
            group = await client.group(group_id)
            return _is_reached(group, state, members)

        if await until(is_reached, timeout_ms):
            return group.to_json()
        conditions = [f"state {state}"] if state is not None else []
        conditions += [f"{members} members"] if members is not None else []
        raise WaitTimeout(f"waited {timeout_ms} ms for {' and '.join(conditions)}, but {group}")

    async def committed(self, group_id: str, arguments: Arguments) -> object:
        arguments.end()
        return await (await self._connected()).committed(group_id)

    async def commit(self, group_id: str, arguments: Arguments) -> object:
        offsets = {topic: _offsets(topic, value) for topic, value in arguments.mapping("offsets").items()}
        arguments.end()
        client = await self._connected()
        await client.commit(group_id, offsets)
        return await client.committed(group_id)

    async def override_target(self, group_id: str, arguments: Arguments) -> object:
        targets = {member: _partitions(member, value) for member, value in arguments.mapping("members").items()}
        arguments.end()
        if not targets:
            raise ControlError("members is missing: an object of member -> topic -> partitions")
        epoch = await self._run(
            group_id, lambda shard, context: shard.override_target_assignment(context, group_id, targets)
        )
        return {"epoch": epoch}

    async def expire_session(self, group_id: str, member: str, arguments: Arguments) -> object:
        arguments.end()
        await self._run(group_id, lambda shard, context: shard.expire_session(context, group_id, member))
        return {}

    async def _run(
        self, group_id: str, operation: Callable[[ControllableShard, OperationContext], CoordinatorResult[T]]
    ) -> T:
        """Runs an operation on the group's shard, and returns its response once its records are written."""
        process = self._host.process

        def on_shard(shard: GroupCoordinatorShard, context: OperationContext, _: None) -> CoordinatorResult[T]:
            assert isinstance(shard, ControllableShard)
            return operation(shard, context)

        reply = process.broker.groups.call(group_id, on_shard, None, internal_operation_context(process.clock.now_ms()))
        return await reply if asyncio.isfuture(reply) else reply


async def until(condition: Callable[[], bool | Awaitable[bool]], timeout_ms: int) -> bool:
    """Polls until the condition holds, at least once. Returns False after the timeout."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_ms / 1000
    while True:
        holds = condition()
        if holds if isinstance(holds, bool) else await holds:
            return True
        if loop.time() >= deadline:
            return False
        await asyncio.sleep(_LOOK_SECONDS)


def _is_reached(group: Group, state: str | None, members: int | None) -> bool:
    return (state is None or state.lower() == group.state.lower()) and (
        members is None or members == len(group.members)
    )


def _partitions(member: str, value: object) -> TopicPartitions:
    if not isinstance(value, dict):
        raise ControlError(f"members.{member} must be an object of topics, not {value!r}")
    for topic, partitions in value.items():
        if not isinstance(partitions, list) or not all(type(partition) is int for partition in partitions):
            raise ControlError(f"members.{member}.{topic} must be a list of partitions, not {partitions!r}")
    return value


def _offsets(topic: str, value: object) -> dict[int, int]:
    """Decodes partition -> offset. In JSON the keys are strings."""
    if not isinstance(value, dict):
        raise ControlError(f"offsets.{topic} must be an object of partitions, not {value!r}")
    offsets = {}
    for partition, offset in value.items():
        if not str(partition).isdecimal() or type(offset) is not int:
            raise ControlError(f"offsets.{topic} must map partitions to offsets, not {partition!r} to {offset!r}")
        offsets[int(partition)] = offset
    return offsets
