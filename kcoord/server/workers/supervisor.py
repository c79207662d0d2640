# SPDX-License-Identifier: Apache-2.0
"""The supervisor of worker processes: starts them, restarts a worker that ends, and stops all of them together.

Theory of operation
-------------------
The supervisor is the parent process. It has one thread and no event loop, and it opens no log, so a fork needs no
cleaning up. Before the first fork it takes everything that workers share or inherit:

* the lock of the data folder
* the listening sockets of all workers, for clients and for the other workers
* two pipes: the lifeline, and the pipe that wakes the supervisor when a signal arrives

The life of a worker, as the supervisor sees it:

    fork -> starting       the worker closes what it inherited for other workers, then starts its broker
    starting -> ready      it writes "ready" to its status pipe; its listeners accept connections
    starting -> ended      it writes the reason to its status pipe, if it knows one
    ready -> ended         its status pipe ends, because the process has ended for any reason
    ended -> fork          after a pause

* The first start: when all workers are ready, the ready line is printed, once. If any worker ends before that, the
  supervisor stops the other workers and fails with StartError.
* Later ends: the worker is restarted, the first time at once. The pause doubles up to `LONGEST_PAUSE_SECONDS`, until a
  worker has run for `QUICK_END_SECONDS`. The other workers keep running.
* The sockets stay open in the supervisor while a worker is restarted. Clients that connect meanwhile wait in the accept
  queue of the kernel and are not refused.
* A restarted worker treats no log as clean: it checks the ends of the logs that it opens.

Shutdown: SIGTERM, SIGINT or SIGHUP ends the watching. All workers get SIGTERM at the same time and have `STOP_SECONDS`
to answer what is in flight and to close their logs; then SIGKILL. The supervisor merges their checkpoints. It writes
the clean-shutdown marker only if every worker closed its logs cleanly and, together, the workers know all logs to be
whole.

If the supervisor itself is killed, the lifeline ends, and each worker stops as after a signal. The data folder stays in
use until the last worker has ended. The next start finds no clean-shutdown marker.
"""

from __future__ import annotations

import gc
import logging
import os
import select
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Final

from kcoord.config import BrokerConfig, Listener
from kcoord.config.workers import worker_count, worker_properties
from kcoord.server.disk.data_folder import candidate_identity
from kcoord.server.environment import RandomUuids
from kcoord.server.errors import StartError
from kcoord.server.net.sockets import bind_listener, bound_port
from kcoord.server.process import ReadyLine, stop_signals
from kcoord.server.workers.worker_process import Launch, Worker, close_inherited, run_worker
from kcoord.storage.errors import StorageError
from kcoord.storage.file_system import RealFileSystem
from kcoord.storage.worker_checkpoints import write_sockets_folder
from kcoord.storage.worker_log_dir import SharedLogDir

_logger = logging.getLogger(__name__)

STOP_SECONDS: Final = 4.8
"""The time in which workers have to end. The supervisor then kills those that still run."""
QUICK_END_SECONDS: Final = 10.0
"""A worker that was ready and ran for this long is restarted without a pause."""
FIRST_PAUSE_SECONDS: Final = 0.1
LONGEST_PAUSE_SECONDS: Final = 5.0
_CHECK_SECONDS: Final = 1.0
_READY: Final = b"ready"
_STATUS_BYTES: Final = 4096


@dataclass(slots=True)
class _Child:
    """The process of a worker. While there is none, `pid` is 0 and `restart_at` is the time of the next start."""

    number: int
    pid: int = 0
    status_pipe: int = -1
    """The descriptor on which the process writes that it is ready, or why it cannot start. It ends with the process."""
    message: bytes = b""
    is_ready: bool = False
    started: float = 0.0
    restart_at: float = 0.0
    pause_seconds: float = 0.0


class Supervisor:
    """The parent of all workers of one configuration."""

    _folder: SharedLogDir
    """Set by `run`."""

    def __init__(self, config: BrokerConfig) -> None:
        self._count = worker_count(config)
        self._config = config
        self._configs = [
            BrokerConfig.from_properties(worker_properties(config, number)) for number in range(self._count)
        ]
        self._children = [_Child(number) for number in range(self._count)]
        self._workers: list[Worker] = []
        self._stopping = False
        self._had_crash = False
        self._has_been_ready = False
        self._lifeline_read, self._lifeline_write = os.pipe()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)

    def run(self, on_ready: Callable[[ReadyLine], None]) -> None:
        """Runs the workers until a signal. Raises StartError if a worker cannot start."""
        folder = self._folder = self._open_folder()
        sockets_folder = tempfile.mkdtemp(prefix="kcoord-")
        try:
            write_sockets_folder(RealFileSystem(), folder.path, sockets_folder)
            self._workers = [self._new_worker(number, sockets_folder) for number in range(self._count)]
            signal.set_wakeup_fd(self._wake_write)
            for number in stop_signals():
                signal.signal(number, self._on_signal)
            gc.freeze()
            for child in self._children:
                self._start(child)
            self._watch(on_ready)
        finally:
            all_ended = self._stop_children()
            for worker in self._workers:
                worker.close()
            shutil.rmtree(sockets_folder, ignore_errors=True)
            try:
                folder.close_after_workers(self._count, had_crash=self._had_crash or not all_ended)
            except (OSError, StorageError) as error:
                _logger.error("The data folder %s could not be closed cleanly: %s", folder.path, error)

    # --- before the workers start -------------------------------------------------------------------------------------

    def _open_folder(self) -> SharedLogDir:
        path = self._config.data_folders[0]
        candidate = candidate_identity(self._config, RandomUuids())
        try:
            return SharedLogDir.open(RealFileSystem(), path, candidate)
        except StorageError as error:
            raise StartError(str(error)) from None
        except OSError as error:
            raise StartError(f"the data folder {path} cannot be used: {error.strerror or error}") from None

    def _new_worker(self, number: int, sockets_folder: str) -> Worker:
        config = self._configs[number]
        sockets = {listener.name: self._bind(listener) for listener in config.open_listeners}
        in_use = {
            listener.name: Listener(
                listener.name, listener.host, bound_port(sockets[listener.name]), listener.security_protocol
            )
            for listener in config.open_listeners
        }
        endpoints = config.advertised(in_use, socket.gethostname())
        path = os.path.join(sockets_folder, str(config.node_id))
        return Worker(number, config, sockets, endpoints, self._peer_socket(path), path)

    @staticmethod
    def _peer_socket(path: str) -> socket.socket:
        peer_socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            peer_socket.bind(path)
            peer_socket.listen()
        except OSError as error:
            peer_socket.close()
            raise StartError(f"cannot make the workers' socket {path}: {error.strerror or error}") from None
        return peer_socket

    @staticmethod
    def _bind(listener: Listener) -> list[socket.socket]:
        try:
            return bind_listener(listener)
        except OSError as error:
            raise StartError(f"cannot listen on {listener}: {error.strerror or error}") from None

    # --- processes ----------------------------------------------------------------------------------------------------

    def _start(self, child: _Child) -> None:
        is_restart = child.started > 0
        read_end, write_end = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read_end)
            self._be_worker(child.number, write_end, is_restart=is_restart)
        os.close(write_end)
        child.pid, child.status_pipe = pid, read_end
        child.message, child.is_ready = b"", False
        child.started = time.monotonic()

    def _be_worker(self, number: int, status_pipe: int, *, is_restart: bool) -> None:
        """Runs a worker in the child process and ends the process. Does not return."""

        def on_ready() -> None:
            # If the supervisor has ended meanwhile, the lifeline ends this worker.
            with suppress(BrokenPipeError):
                os.write(status_pipe, _READY)

        code = 1
        try:
            signal.set_wakeup_fd(-1)
            for signal_number in stop_signals():
                signal.signal(signal_number, signal.SIG_DFL)
            launch = Launch(number, self._workers, self._folder, self._lifeline_read, is_restart)
            inherited = [child.status_pipe for child in self._children if child.status_pipe >= 0]
            close_inherited(launch, [self._lifeline_write, self._wake_read, self._wake_write, *inherited])
            run_worker(launch, on_ready)
            code = 0
        except StartError as error:
            os.write(status_pipe, str(error).encode()[:_STATUS_BYTES])
        except BaseException:
            _logger.exception("Worker %d failed", number)
        finally:
            logging.shutdown()
            os._exit(code)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._stopping = True

    # --- watching -----------------------------------------------------------------------------------------------------

    def _watch(self, on_ready: Callable[[ReadyLine], None]) -> None:
        while not self._stopping:
            for child in self._wait_for_messages():
                self._read_message(child)
            if not self._has_been_ready and all(child.is_ready for child in self._children):
                self._has_been_ready = True
                on_ready(self._ready())
            for child in self._children:
                if not child.pid and child.restart_at <= time.monotonic():
                    self._start(child)

    def _wait_for_messages(self) -> list[_Child]:
        """Waits until a status pipe can be read, a signal arrives or a restart is due, but at most a second.

        Returns the children whose status pipes can be read.
        """
        by_status = {child.status_pipe: child for child in self._children if child.status_pipe >= 0}
        now = time.monotonic()
        due = [child.restart_at - now for child in self._children if not child.pid]
        timeout = max(min([_CHECK_SECONDS, *due]), 0.0)
        readable = wait_readable([*by_status, self._wake_read], timeout)
        if self._wake_read in readable:
            os.read(self._wake_read, _STATUS_BYTES)
        return [by_status[descriptor] for descriptor in readable if descriptor in by_status]

    def _read_message(self, child: _Child) -> None:
        """Takes in what a worker wrote to its status pipe, or its end."""
        message = os.read(child.status_pipe, _STATUS_BYTES)
        if message:
            child.message += message
            child.is_ready = child.message == _READY
            if child.is_ready and self._has_been_ready:
                _logger.info("Worker %d serves again", child.number)
            return
        code = self._reap(child)
        if not self._has_been_ready:
            raise StartError(child.message.decode() or f"worker {child.number} ended with status {code} at its start")
        self._plan_restart(child, code)

    def _reap(self, child: _Child) -> int:
        """Waits for the process of a child, which has ended. Returns its exit code, or minus the number of a signal."""
        os.close(child.status_pipe)
        _, status = os.waitpid(child.pid, 0)
        child.pid, child.status_pipe = 0, -1
        return os.waitstatus_to_exitcode(status)

    def _plan_restart(self, child: _Child, code: int) -> None:
        self._had_crash = True
        lived_seconds = time.monotonic() - child.started
        if child.is_ready and lived_seconds >= QUICK_END_SECONDS:
            child.pause_seconds = 0.0
        reason = child.message.decode(errors="replace") if not child.is_ready else ""
        _logger.error(
            "Worker %d ended with status %d%s: it is restarted%s",
            child.number,
            code,
            f" ({reason})" if reason else "",
            f" in {child.pause_seconds:.1f} s" if child.pause_seconds else "",
        )
        child.restart_at = time.monotonic() + child.pause_seconds
        child.pause_seconds = min(max(child.pause_seconds * 2, FIRST_PAUSE_SECONDS), LONGEST_PAUSE_SECONDS)

    def _ready(self) -> ReadyLine:
        addresses = [str(endpoint) for worker in self._workers for endpoint in worker.endpoints]
        return ReadyLine(addresses, self._config.node_id, self._folder.identity.cluster_id, self._count)

    # --- the end ------------------------------------------------------------------------------------------------------

    def _stop_children(self) -> bool:
        """Ends all workers at the same time. Returns True if each of them ended with status 0, without SIGKILL."""
        running = [child for child in self._children if child.pid]
        for child in running:
            os.kill(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        codes = []
        while running and time.monotonic() < deadline:
            ended = set(self._ended(running, deadline - time.monotonic()))
            codes += [self._reap(child) for child in running if child.number in ended]
            running = [child for child in running if child.number not in ended]
        for child in running:
            _logger.error("Worker %d has not ended within %.1f s and is killed", child.number, STOP_SECONDS)
            os.kill(child.pid, signal.SIGKILL)
            codes.append(self._reap(child))
        return not any(codes)

    def _ended(self, running: Iterable[_Child], timeout: float) -> list[int]:
        by_status = {child.status_pipe: child for child in running}
        readable = wait_readable(by_status, timeout)
        return [by_status[descriptor].number for descriptor in readable if not os.read(descriptor, _STATUS_BYTES)]


def wait_readable(descriptors: Iterable[int], timeout: float) -> list[int]:
    """Waits until a descriptor can be read, but at most `timeout` seconds. Returns those that can be read.

    `select.select` would fail with descriptors above 1023, which 250 workers with two listeners have.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(max(timeout, 0.0) * 1000)]
