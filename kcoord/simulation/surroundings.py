# SPDX-License-Identifier: Apache-2.0
"""What surrounds the server in a run: an ear for its log, in which a defect would show that it survives, and an eye on
its short cuts, of which nothing else tells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from kcoord.runtime import shard_snapshots
from kcoord.server.disk import shard_logs
from kcoord.server.fast.commit import CommitFastPath
from kcoord.server.fast.fast_path import FastAnswer, FastPath
from kcoord.server.fast.fetch import FetchFastPath
from kcoord.server.fast.heartbeat import HeartbeatFastPath
from kcoord.server.fast.metadata import MetadataFastPath
from kcoord.server.shards import group_service, metadata_service
from kcoord.simulation.observer import Observer
from kcoord.simulation.options import Options
from kcoord.simulation.trace import Trace, ViolationError
from kcoord.storage.errors import StorageError
from kcoord_protocol.errors import KafkaError

_EVENTS: Final = {
    "No snapshot of %s: %s": "snapshot-failed",
    "The snapshot of %s is older than tombstones are kept, the whole log is read": "snapshot-too-old",
    "Writing to the log of %s failed: %s": "failed",
    "Loading shard %d of %s failed: %s": "open-failed",
}
"""Lines that count as events."""
_SHORT_CUTS: Final[Mapping[type[FastPath], str]] = {
    HeartbeatFastPath: "steady",
    CommitFastPath: "packed-commit",
    FetchFastPath: "packed-fetch",
    MetadataFastPath: "same-metadata",
}
"""Events that say which way a request took."""
_SIMULATED: Final = (OSError, StorageError, KafkaError)
"""Errors that have their reason in the world around."""


class _Ear(logging.Handler):
    """Hears what the server logs."""

    def __init__(self, trace: Trace, observer: Observer) -> None:
        super().__init__()
        self._trace = trace
        self._observer = observer

    def emit(self, record: logging.LogRecord) -> None:
        self._trace.add(_EVENTS.get(str(record.msg), "log"), f"{record.levelname} {record.getMessage()}")
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, _SIMULATED):
            violation = ViolationError("I-0 no unexpected error", f"{record.getMessage()}: {error!r}")
            violation.__cause__ = error
            self._observer.violated(violation)


def _told(trace: Trace, event: str, answer: Callable[..., FastAnswer]) -> Callable[..., FastAnswer]:
    def told(self: FastPath, frame: bytes, now_ms: int) -> FastAnswer:
        found = answer(self, frame, now_ms)
        if found is not None:
            trace.add(event)
        return found

    return told


def _limits(options: Options) -> list[tuple[object, str, object]]:
    """Limits far below those of the server, so that they are reached in a small world."""
    limits: list[tuple[object, str, object]] = [
        (shard_snapshots, "LEAST_GROWTH_AT_STOP_BYTES", 500),
        (shard_logs, "LOAD_SLICE_BYTES", 2_048),
        (metadata_service, "ORDER_SECONDS", 600.0),
    ]
    if options.snapshot_bytes:
        limits.append((shard_snapshots, "LEAST_GROWTH_BYTES", options.snapshot_bytes))
    if not options.inline_ms:
        limits.append((group_service, "LONGEST_ON_LOOP_US", -1))
    return limits


@contextmanager
def around(options: Options, trace: Trace, observer: Observer) -> Iterator[None]:
    """As long as a run lasts."""
    logger = logging.getLogger("kcoord")
    ear = _Ear(trace, observer)
    before = logger.level, logger.propagate
    limits = [(owner, name, getattr(owner, name)) for owner, name, _ in _limits(options)]
    answers = [(fast_path, fast_path.answer) for fast_path in _SHORT_CUTS]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(ear)
    for fast_path, answer in answers:
        fast_path.answer = _told(trace, _SHORT_CUTS[fast_path], answer)  # type: ignore[method-assign]
    for owner, name, value in _limits(options):
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in limits:
            setattr(owner, name, value)
        for fast_path, answer in answers:
            fast_path.answer = answer  # type: ignore[method-assign]
        level, logger.propagate = before
        logger.setLevel(level)
        logger.removeHandler(ear)
