# SPDX-License-Identifier: Apache-2.0
"""Imports groups from the upstream's own coordinator when they are first needed.

Theory of operation. `kcoord.coordinator.group.imports` has the rules. `kcoord.upstream.importing_api` asks
`must_wait` before each request about a group. It is a look at three sets, and False for every group that the shard
knows, unless an earlier request waits. If it is True, the request waits for `settle`:

0. If the shard is being loaded, the request waits for that, at most LOAD_SECONDS. Clients would retry, but librdkafka
   soon passes COORDINATOR_LOAD_IN_PROGRESS on to the application.
1. The offsets are fetched from the upstream. All requests about a group share one fetch.
2. The shard imports them. It decides once more whether they may be imported, since it may have been loaded again, or
   may have moved to another process and back. The request continues when the offsets are durable.
3. If there was nothing to import and the request may create the group, the shard writes the import record.

If a fetch fails, no request about the group is answered from an empty state: clients get the retriable error
COORDINATOR_LOAD_IN_PROGRESS, and their next request begins with step 1. That includes groups that still have members
there. A member here would read the same partitions as those, and the offsets that they commit later would be lost.

A process imports the groups of the shards that it owns. For other groups `must_wait` is False, and the request gets the
same error as without imports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from typing import Final, TypeAlias

from kcoord.coordinator.group.imports import ImportedOffset, ImportOutcome, ImportRequest
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.runtime.waiting import ShardState
from kcoord.server.broker import Broker
from kcoord.server.replies import internal_operation_context
from kcoord_protocol.errors import Errors, KafkaError

FetchOffsets: TypeAlias = Callable[[str], Awaitable[Sequence[ImportedOffset]]]
"""Returns the committed offsets of a group in the upstream, none if it does not know the group.

Raises NON_EMPTY_GROUP if the group has members there, and any other KafkaError if the offsets cannot be known.
"""

_MOST_REPORTED: Final = 1_000
LOAD_SECONDS: Final = 5.0

_logger = logging.getLogger(__name__)


class NotFetchedError(KafkaError):
    """The offsets of a group could not be fetched from the upstream."""


class GroupImports:
    """The imports of one process; the module describes the steps. If not `on_demand`, only `run` imports groups."""

    def __init__(self, broker: Broker, fetch: FetchOffsets, *, on_demand: bool) -> None:
        self._broker = broker
        self._groups = broker.groups
        self._fetch = fetch
        self._on_demand = on_demand
        self._running: dict[str, asyncio.Task[None]] = {}
        self._waiting: Counter[str] = Counter()
        """The number of requests about a group that wait. Later ones wait, too, so that commits keep their order."""
        self._reported: dict[str, str] = {}
        """Why groups could not be imported, so that each reason is logged once."""

    def must_wait(self, group_id: str, *, creates: bool = False) -> bool:
        """Returns whether a request about a group has to wait. `creates`: it may create the group."""
        return group_id in self._waiting or self._is_due(group_id, creates=creates)

    @contextlib.contextmanager
    def waiting(self, group_ids: Collection[str]) -> Iterator[None]:
        """Makes later requests about these groups wait, too."""
        self._waiting.update(group_ids)
        try:
            yield
        finally:
            for group_id in group_ids:
                self._waiting[group_id] -= 1
                if not self._waiting[group_id]:
                    del self._waiting[group_id]

    def _is_due(self, group_id: str, *, creates: bool = False) -> bool:
        shard = self._groups.shards.active_for(group_id)
        machine = shard.machine if shard is not None else None
        if machine is None:
            return self._is_loading(group_id)
        if not group_id or machine.has_import(group_id):
            return False
        if machine.has_group(group_id) or not self._on_demand:
            return creates
        return True

    async def settle(self, group_id: str, *, creates: bool = False) -> None:
        """Imports the offsets of a group. If it has none and the request `creates` the group, records that.

        Raises KafkaError if the request must not be answered now.
        """
        if self._is_loading(group_id):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOAD_SECONDS):
                    await self._groups.loaded()
        if not self._is_due(group_id, creates=creates):
            return
        if self._on_demand and not self._has_group(group_id):
            task = self._running.get(group_id)
            if task is None:
                task = self._running[group_id] = self._broker.spawn(self._import(group_id))
                task.add_done_callback(lambda _: self._running.pop(group_id))
            # A request that is abandoned does not end the fetch for the others.
            await asyncio.shield(task)
        if creates and self._is_due(group_id, creates=True):
            await self._write(ImportRequest(group_id))

    def _is_loading(self, group_id: str) -> bool:
        """Returns whether the shard of a group is being loaded now."""
        groups = self._groups
        return groups.shards.is_loading and groups.shards.state(groups.shard_of(group_id)) is ShardState.LOADING

    def _has_group(self, group_id: str) -> bool:
        shard = self._groups.shards.active_for(group_id)
        return shard is not None and shard.machine is not None and shard.machine.has_group(group_id)

    async def _import(self, group_id: str) -> None:
        try:
            await self.run(ImportRequest(group_id))
        except NotFetchedError as error:
            reason = error.message or error.error.description
            self._groups.counters.imports["failed"] += 1
            if self._reported.get(group_id) != reason:
                if len(self._reported) >= _MOST_REPORTED:
                    self._reported.clear()
                self._reported[group_id] = reason
                _logger.warning("Group %s is not served: its offsets cannot be imported: %s", group_id, reason)
            raise KafkaError(
                Errors.COORDINATOR_LOAD_IN_PROGRESS, f"The offsets of group {group_id} cannot be imported: {reason}"
            ) from None

    async def run(self, request: ImportRequest) -> tuple[ImportOutcome, int]:
        """Imports a group now, if its shard allows that. Returns the outcome and the number of its offsets there.

        The offsets of `request` are replaced by those of the upstream. Raises NotFetchedError, and KafkaError
        if the shard cannot import the group, for example NOT_COORDINATOR if another process owns it.
        """
        group_id = request.group_id
        outcome = await self._write(request._replace(dry_run=True))
        if outcome is ImportOutcome.PRESENT or (outcome is ImportOutcome.DEPARTED and not request.again):
            return outcome, 0
        try:
            offsets = await self._fetch(group_id)
        except KafkaError as error:
            raise NotFetchedError(error.error, error.message) from None
        if not offsets:
            return ImportOutcome.NOTHING, 0
        outcome = await self._write(request._replace(offsets=offsets))
        if outcome is ImportOutcome.IMPORTED and not request.dry_run:
            self._reported.pop(group_id, None)
            self._groups.counters.imports["imported"] += 1
            self._groups.counters.imports["offsets"] += len(offsets)
            _logger.info("Imported %d offsets of group %s", len(offsets), group_id)
        return outcome, len(offsets)

    async def _write(self, request: ImportRequest) -> ImportOutcome:
        """Runs the operation of the shard, and waits until its records are durable."""
        shard_id = self._groups.shard_of(request.group_id)
        context = internal_operation_context(self._broker.now_ms())
        reply = self._groups.call_shard(shard_id, GroupCoordinatorShard.import_offsets, request, context)
        return await reply if asyncio.isfuture(reply) else reply

    async def forget(self) -> int:
        """Deletes the import records of departed groups of which the upstream has no offsets any more.

        Returns their number. Ends early if the upstream does not answer.
        """
        forgotten = 0
        for shard_id in self._groups.shard_ids:
            machine = self._groups.shards.machine(shard_id)
            for group_id in machine.departed_groups() if machine is not None else ():
                try:
                    if await self._fetch(group_id):
                        continue
                    context = internal_operation_context(self._broker.now_ms())
                    reply = self._groups.call_shard(shard_id, GroupCoordinatorShard.forget_imports, [group_id], context)
                    forgotten += len(await reply if asyncio.isfuture(reply) else reply)
                except KafkaError as error:
                    if error.error is not Errors.NON_EMPTY_GROUP:
                        _logger.debug("The import records of departed groups are kept: %s", error)
                        return forgotten
        return forgotten
