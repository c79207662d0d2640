# SPDX-License-Identifier: Apache-2.0
"""Changes to the server's modules that last as long as a run.

* A handler of the server's log: an unexpected exception that the server survives and logs is a violation (I-0).
* Counters around the fast paths: nothing else shows whether a fast path or a handler answered a request.
* Limits far below those of production, so that a small world reaches them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Final

from kcoord.runtime import shard_snapshots
from kcoord.server.disk import shard_logs
from kcoord.server.fast.fast_path import FastPath, FastResponse
from kcoord.server.fast.heartbeat import HeartbeatFastPath
from kcoord.server.fast.metadata import MetadataFastPath
from kcoord.server.fast.offset_commit import OffsetCommitFastPath
from kcoord.server.fast.offset_fetch import OffsetFetchFastPath
from kcoord.server.shards import group_service, metadata_service
from kcoord.simulation.assignor_checks import AssignorChecks
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
"""Kinds of events in the trace, by the format of the server's log line; all other lines are events of kind "log"."""
_SHORT_CUTS: Final[Mapping[type[FastPath], str]] = {
    HeartbeatFastPath: "steady",
    OffsetCommitFastPath: "packed-commit",
    OffsetFetchFastPath: "packed-fetch",
    MetadataFastPath: "same-metadata",
}
"""Kinds of events in the trace, by the fast path that answered a request."""
_SIMULATED: Final = (OSError, StorageError, KafkaError)
"""Errors that simulated faults cause; all others in the server's log are violations."""


class LogObserver(logging.Handler):
    """Adds the server's log lines to the trace, and reports unexpected exceptions."""

    def __init__(self, trace: Trace, violated: Callable[[ViolationError], None]) -> None:
        super().__init__()
        self._trace = trace
        self._violated = violated

    def emit(self, record: logging.LogRecord) -> None:
        self._trace.add(_EVENTS.get(str(record.msg), "log"), f"{record.levelname} {record.getMessage()}")
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, _SIMULATED):
            violation = ViolationError("I-0 no unexpected error", f"{record.getMessage()}: {error!r}")
            violation.__cause__ = error
            self._violated(violation)


def _counted(trace: Trace, event: str, respond: Callable[..., FastResponse]) -> Callable[..., FastResponse]:
    """Wraps the `respond` method of a fast path: each response adds an event to the trace."""

    def counted(self: FastPath, frame: bytes, now_ms: int) -> FastResponse:
        response = respond(self, frame, now_ms)
        if response is not None:
            trace.add(event)
        return response

    return counted


def _limits(options: Options) -> list[tuple[object, str, object]]:
    """Returns (module, name, value) of the limits that differ from production.

    ORDER_SECONDS is the exception: it is far above production, see `controller`.
    """
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
    """Applies the changes while a run lasts, and restores the modules afterwards."""
    logger = logging.getLogger("kcoord")
    log_observer = LogObserver(trace, observer.violated)
    before = logger.level, logger.propagate
    limits = [(owner, name, getattr(owner, name)) for owner, name, _ in _limits(options)]
    methods = [(fast_path, fast_path.respond) for fast_path in _SHORT_CUTS]
    logger.setLevel(logging.INFO)
    logger.propagate = False
    logger.addHandler(log_observer)
    for fast_path, respond in methods:
        fast_path.respond = _counted(trace, _SHORT_CUTS[fast_path], respond)  # type: ignore[method-assign]
    for owner, name, value in _limits(options):
        setattr(owner, name, value)
    checks = AssignorChecks(observer).watching() if options.has_client_assignors else nullcontext()
    try:
        with checks:
            yield
    finally:
        for owner, name, value in limits:
            setattr(owner, name, value)
        for fast_path, respond in methods:
            fast_path.respond = respond  # type: ignore[method-assign]
        level, logger.propagate = before
        logger.setLevel(level)
        logger.removeHandler(log_observer)
