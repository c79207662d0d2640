# SPDX-License-Identifier: Apache-2.0
"""The state of two instances and the log of one shard in an upstream, and all steps from a state.

Theory of operation. Each instance has a real `UpstreamLog`, and a real `UpstreamReader` for its standby. The partition
is that of the simulation. The state machine of the shard is a number: each append sets it to a number that was never
used before. Messages are in flight until a step delivers them. So claims, appends, fetches of standbys and takeovers
interleave in every order. Time stands still: a request that has failed is repeated by a step.

Requests may lose their answers, and may arrive late, after their sender has given them up or has crashed. A batch is
replicated at once. Both instances have the same name, so states that differ by a swap of the instances count once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeAlias

from kcoord.runtime.shard_log import Append, Load
from kcoord.runtime.upstream_actions import Fetch, FindStart, InitProducerId, Loaded, Opened, Produce, Request, Written
from kcoord.runtime.upstream_claim import UpstreamState
from kcoord.runtime.upstream_log import UpstreamLog
from kcoord.runtime.upstream_reader import DivergedError, UpstreamReader
from kcoord.simulation.trace import ViolationError
from kcoord.simulation.upstream.partition import ModelPartition, TransactionalIds, entries_of
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.record_batch import BatchHeader, encode_batch_from_parts

KEY: Final = b"n"
_ID: Final = "shard"
_NEVER_MS: Final = 1 << 60
_NOW_MS: Final = 0

NewLog: TypeAlias = Callable[[], UpstreamLog]
NewReader: TypeAlias = Callable[[], UpstreamReader]


class TakeoverBudget(NamedTuple):
    """How often each event may still happen."""

    claims: int = 3
    puts: int = 2
    losses: int = 1
    late: int = 1
    crashes: int = 1


@dataclass(slots=True)
class CheckedInstance:
    """An instance. `value` is the number that its state machine has, also as a standby."""

    log: UpstreamLog
    reader: UpstreamReader
    value: int = 0
    is_active: bool = False
    """True if the shard is loaded."""
    load: Load | None = None
    append: Append | None = None
    requests: list[Request] = field(default_factory=list)
    """The requests in flight."""

    def copied(self) -> CheckedInstance:
        other = copy(self)
        other.log = copy(self.log)
        shared = self.log.reader is self.reader
        other.log.reader = _copied(self.log.reader)
        other.reader = other.log.reader if shared else _copied(self.reader)
        other.log.actions = []
        other.log._waiting = [copy(batch) for batch in self.log._waiting]
        other.log._batch = copy(self.log._batch)
        other.requests = list(self.requests)
        return other

    def key(self) -> tuple[object, ...]:
        log = self.log
        batch = log._batch
        return (
            log.state.value,
            log.claimed_id,
            log._sequence,
            _reader_key(log.reader),
            _reader_key(self.reader),
            log.reader is self.reader,
            None if batch is None else (batch.data, batch.answered_at, batch.seen_at),
            tuple(waiting.data for waiting in log._waiting),
            log._attempts > 0,
            log.retry_ms is not None,
            None if log._claim is None else log._claim.base_offset,
            self.value,
            self.is_active,
            self.load is None,
            None if self.append is None else self.append.data,
            tuple(sorted(_request_key(request, log) for request in self.requests)),
        )


def _copied(reader: UpstreamReader) -> UpstreamReader:
    other = copy(reader)
    other.batches = copy(reader.batches)
    other.batches._earlier_ids = set(reader.batches._earlier_ids)
    return other


def _reader_key(reader: UpstreamReader) -> tuple[object, ...]:
    return reader.position, reader.last, reader._check, reader.has_owner, reader.settled_id, reader.batches.claim


def _request_key(request: Request, log: UpstreamLog) -> tuple[str, bytes, int, bool]:
    data = request.data if isinstance(request, Produce) else b""
    offset = request.offset if isinstance(request, Fetch) else 0
    return type(request).__name__, data, offset, request is log._request


@dataclass(slots=True)
class TakeoverState:
    """The partition, the instances, what may still arrive, and what was acknowledged."""

    partition: ModelPartition
    ids: TransactionalIds
    instances: list[CheckedInstance]
    late: list[bytes]
    acknowledged: tuple[int, ...]
    budget: TakeoverBudget

    def copied(self) -> TakeoverState:
        partition = copy(self.partition)
        partition.batches, partition.written = list(self.partition.batches), list(self.partition.written)
        partition.producers = {
            producer_id: type(seen)(seen.epoch, seen.last_ms, seen.last_sequence, copy(seen.batches))
            for producer_id, seen in self.partition.producers.items()
        }
        ids = TransactionalIds()
        ids.next_id, ids.ids = self.ids.next_id, dict(self.ids.ids)
        instances = [instance.copied() for instance in self.instances]
        return TakeoverState(partition, ids, instances, list(self.late), self.acknowledged, self.budget)

    def key(self) -> int:
        """Returns the fingerprint of the state."""
        return hash(
            (
                tuple(data for _, data in self.partition.batches),
                self.ids.ids.get(_ID),
                tuple(sorted(map(repr, (instance.key() for instance in self.instances)))),
                tuple(sorted(self.late)),
                self.acknowledged,
                self.budget,
            )
        )

    def is_served(self) -> bool:
        """True if the shard has one owner, which has everything, and nothing is under way."""
        return any(
            instance.is_active
            and instance.append is None
            and not instance.requests
            and instance.log.state is UpstreamState.OWNER
            and instance.log.reader.position == self.partition.end_offset
            for instance in self.instances
        )


class TakeoverStep(NamedTuple):
    """A step: its name, whether it is fair (no fault, no new work), and the state after it."""

    name: str
    is_fair: bool
    state: TakeoverState


def first_state(budget: TakeoverBudget, new_log: NewLog, new_reader: NewReader) -> TakeoverState:
    instances = [CheckedInstance(new_log(), new_reader()) for _ in range(2)]
    return TakeoverState(ModelPartition(), TransactionalIds(), instances, [], (), budget)


def new_log() -> UpstreamLog:
    return UpstreamLog("instance", write_timeout_ms=_NEVER_MS, foreign_id_wait_ms=_NEVER_MS, renew_after_ms=_NEVER_MS)


def new_reader() -> UpstreamReader:
    return UpstreamReader(_NOW_MS)


class TakeoverSteps:
    """Makes all steps from a state. `make_reader` makes the readers of standbys that begin at the beginning."""

    def __init__(self, make_reader: NewReader = new_reader) -> None:
        self._make_reader = make_reader

    def of(self, state: TakeoverState) -> Iterator[TakeoverStep]:
        """Yields all steps. Raises ViolationError if one breaks a property."""
        budget = state.budget
        for number, instance in enumerate(state.instances):
            if instance.load is None and instance.append is None and not instance.is_active and budget.claims:
                yield self._step(state, f"claim {number}", self._claim, number, spend="claims")
            if instance.is_active and instance.append is None and budget.puts:
                yield self._step(state, f"put {number}", self._put, number, spend="puts")
            for place, request in enumerate(instance.requests):
                name = f"{type(request).__name__} {number}"
                yield self._step(state, f"deliver {name}", self._deliver, number, place, fair=True)
                if budget.losses:
                    yield self._step(state, f"lose the answer of {name}", self._lose, number, place, spend="losses")
                if budget.late and isinstance(request, Produce):
                    yield self._step(state, f"delay {name}", self._delay, number, place, spend="late")
            if instance.log.retry_ms is not None:
                yield self._step(state, f"repeat {number}", self._repeat, number, fair=True)
            if self._can_follow(state, instance):
                yield self._step(state, f"follow {number}", self._follow, number, fair=True)
            if budget.crashes:
                yield self._step(state, f"crash {number}", self._crash, number, spend="crashes")
        for place in range(len(state.late)):
            yield self._step(state, "arrive late", self._arrive, place, fair=True)

    @staticmethod
    def _step(
        state: TakeoverState, name: str, act: Callable[..., None], *arguments: int, fair: bool = False, spend: str = ""
    ) -> TakeoverStep:
        after = state.copied()
        if spend:
            after.budget = after.budget._replace(**{spend: getattr(after.budget, spend) - 1})
        act(after, *arguments)
        check(after)
        return TakeoverStep(name, fair, after)

    # The instance.

    def _claim(self, state: TakeoverState, number: int) -> None:
        instance = state.instances[number]
        instance.load = Load(0, with_snapshot=False)
        instance.log.open(instance.load, _NOW_MS, instance.reader)
        self._settle(state, instance)

    def _put(self, state: TakeoverState, number: int) -> None:
        instance = state.instances[number]
        value = 10 - state.budget.puts
        instance.append = Append(0, 0, 1, encode_batch_from_parts([(KEY, b"%d" % value)], _NOW_MS))
        instance.value = value
        instance.log.append(instance.append, _NOW_MS)
        self._settle(state, instance)

    def _crash(self, state: TakeoverState, number: int) -> None:
        """Loses everything in memory. Requests in flight may still arrive."""
        instance = state.instances[number]
        state.late += [request.data for request in instance.requests if isinstance(request, Produce)]
        instance.log.close()
        self._begin_anew(instance)

    def _begin_anew(self, instance: CheckedInstance) -> None:
        instance.requests, instance.load, instance.append = [], None, None
        instance.is_active, instance.value, instance.reader = False, 0, self._make_reader()

    def _repeat(self, state: TakeoverState, number: int) -> None:
        instance = state.instances[number]
        assert instance.log.retry_ms is not None
        instance.log.tick(instance.log.retry_ms)
        self._settle(state, instance)

    def _settle(self, state: TakeoverState, instance: CheckedInstance) -> None:
        """Handles the actions of the log."""
        log = instance.log
        while log.actions:
            actions, log.actions = log.actions, []
            for action in actions:
                match action:
                    case InitProducerId() | Produce() | Fetch() | FindStart():
                        instance.requests.append(action)
                    case Opened(load):
                        log.read(load)
                    case Loaded(load, batches, is_end):
                        for _, data in batches:
                            instance.value = _value_of(data, instance.value)
                        if is_end:
                            instance.load, instance.is_active = None, True
                            check_loaded(state, instance)
                        else:
                            log.read(load)
                    case Written(append):
                        instance.append = None
                        state.acknowledged += (_value_of(append.data, 0),)
                        check_acknowledged(state, instance)
                    case _:
                        # The shard is lost, or cannot be claimed. The machine is dropped, and reads from the beginning.
                        self._begin_anew(instance)

    def _can_follow(self, state: TakeoverState, instance: CheckedInstance) -> bool:
        if instance.load is not None:
            return False
        reader = instance.log.reader if instance.is_active else instance.reader
        return reader.position < state.partition.end_offset or not reader.is_verified

    def _follow(self, state: TakeoverState, number: int) -> None:
        """Reads the next batch as a standby, or as the owner."""
        instance = state.instances[number]
        if instance.is_active:
            instance.log.followed(state.partition.fetch(instance.log.reader.fetch_offset, 1), _NOW_MS)
            self._settle(state, instance)
            return
        try:
            for _, data in instance.reader.take(state.partition.fetch(instance.reader.fetch_offset, 1), _NOW_MS):
                instance.value = _value_of(data, instance.value)
        except DivergedError:
            self._begin_anew(instance)

    # The network.

    def _deliver(self, state: TakeoverState, number: int, place: int) -> None:
        instance = state.instances[number]
        request, log = instance.requests.pop(place), instance.log
        try:
            match request:
                case InitProducerId():
                    log.initialized(request, *state.ids.init(_ID), _NOW_MS)
                case Produce(data):
                    log.produced(request, _appended(state, data), _NOW_MS)
                case Fetch(offset):
                    log.fetched(request, state.partition.fetch(offset, 1), _NOW_MS)
                case FindStart():
                    log.found_start(request, state.partition.start_offset, _NOW_MS)
        except KafkaError as error:
            log.refused(request, error, _NOW_MS)
        self._settle(state, instance)

    def _lose(self, state: TakeoverState, number: int, place: int) -> None:
        """The request arrives, and its answer is lost."""
        instance = state.instances[number]
        request = instance.requests.pop(place)
        if isinstance(request, InitProducerId):
            state.ids.init(_ID)
        elif isinstance(request, Produce):
            with suppress(KafkaError):
                _appended(state, request.data)
        instance.log.refused(request, KafkaError(Errors.REQUEST_TIMED_OUT), _NOW_MS)
        self._settle(state, instance)

    def _delay(self, state: TakeoverState, number: int, place: int) -> None:
        """The sender gives the request up, and it may arrive later."""
        instance = state.instances[number]
        request = instance.requests.pop(place)
        assert isinstance(request, Produce)
        state.late.append(request.data)
        instance.log.refused(request, KafkaError(Errors.NETWORK_EXCEPTION), _NOW_MS)
        self._settle(state, instance)

    def _arrive(self, state: TakeoverState, place: int) -> None:
        with suppress(KafkaError):
            _appended(state, state.late.pop(place))


def _appended(state: TakeoverState, data: bytes) -> int:
    offset = state.partition.append(data)
    state.partition.replicate()
    return offset


def _value_of(data: bytes, before: int) -> int:
    values = [int(value) for _, key, value in entries_of(data) if key == KEY and value is not None]
    return values[-1] if values else before


# Properties.


def _replayed(batches: list[tuple[BatchHeader, bytes]], end_offset: int) -> int:
    value = 0
    for header, data in batches:
        if header.next_offset <= end_offset:
            value = _value_of(data, value)
    return value


def check(state: TakeoverState) -> None:
    """Checks the properties of every state."""
    batches = state.partition.batches
    values = [_value_of(data, 0) for _, data in batches if _value_of(data, 0)]
    if len(set(values)) < len(values):
        raise ViolationError("NoDuplicate", f"the log has {values}")
    lost = set(state.acknowledged) - set(values)
    if lost:
        raise ViolationError("AcknowledgedIsInTheLog", f"{lost} of {state.acknowledged} are not in the log: {values}")
    if state.acknowledged != tuple(value for value in values if value in state.acknowledged):
        text = f"{state.acknowledged} were acknowledged, and the log has {values}"
        raise ViolationError("AcknowledgedInOrder", text)
    for instance in state.instances:
        if instance.load is None and not instance.is_active and instance.reader.is_verified:
            expected = _replayed(batches, instance.reader.position)
            if instance.value != expected:
                raise ViolationError("StandbyIsTheLog", f"a standby has {instance.value}, its log {expected}")


def check_loaded(state: TakeoverState, instance: CheckedInstance) -> None:
    """Checks that a new owner has everything that the log has before its claim."""
    expected = _replayed(state.partition.batches, instance.log.reader.position)
    if instance.value != expected:
        raise ViolationError("OwnerIsTheLog", f"an owner begins with {instance.value}, the log has {expected}")


def check_acknowledged(state: TakeoverState, instance: CheckedInstance) -> None:
    """Checks that an append was written by the instance that acknowledges it, before any later claim."""
    owner = (-1, -1)
    for header, data in state.partition.batches:
        if entries_of(data)[0][1] != KEY:
            owner = header.producer_id, header.producer_epoch
        elif _value_of(data, 0) == state.acknowledged[-1] and owner != instance.log.claimed_id:
            text = f"{state.acknowledged[-1]} was written under the claim {owner}, not {instance.log.claimed_id}"
            raise ViolationError("OnlyTheOwnerAcknowledges", text)
