# SPDX-License-Identifier: Apache-2.0
"""`kcoord serve --test-mode`: a broker in its own process, with its files in memory and its control over HTTP."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import uvloop

from kcoord.server.errors import StartError
from kcoord.server.process import ReadyLine
from kcoord.testing.controller import BrokerController
from kcoord.testing.host import BrokerHost
from kcoord.testing.http_control import HttpControl

if TYPE_CHECKING:
    OnReady = Callable[[ReadyLine, str], None]


def run(
    settings: Mapping[str, str], control_host: str, control_port: int, on_ready: OnReady, *, ends_with_stdin: bool
) -> None:
    """Runs until SIGTERM or SIGINT. Raises StartError if it cannot start. `on_ready` gets the control's URL.

    With `ends_with_stdin` the broker also ends when nobody can write to its standard input any more. So it does not
    outlive the process that holds the pipe, even if that process is killed.
    """
    uvloop.run(_run(settings, control_host, control_port, on_ready, ends_with_stdin))


async def _run(
    settings: Mapping[str, str], control_host: str, control_port: int, on_ready: OnReady, ends_with_stdin: bool
) -> None:
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)
    if ends_with_stdin:
        loop.add_reader(sys.stdin.fileno(), ended.set)
    host = BrokerHost(settings, strict=False)
    await host.start()
    controller = BrokerController(host)
    try:
        try:
            control = HttpControl(control_host, control_port, controller, loop)
        except OSError as error:
            raise StartError(
                f"cannot listen on {control_host}:{control_port} for the control: {error.strerror or error}"
            ) from None
        on_ready(host.process.ready(), control.url)
        await ended.wait()
        await asyncio.to_thread(control.close)
    finally:
        await controller.close()
        await host.stop()
