# SPDX-License-Identifier: Apache-2.0
"""`kcoord workers fence|unfence BROKER --data DIR`: fences or unfences one broker of several worker processes.

It connects to the Unix sockets of the workers, so it works only on their machine and as their user.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
from collections.abc import Sequence

from kcoord.cli.options import seconds, whole_number
from kcoord_protocol.errors import DecodeError, Errors, FramingError
from kcoord_protocol.framing import FrameReader

FENCE, UNFENCE = "fence", "unfence"
_RECEIVE_BYTES = 65536
_CORRELATION_ID = 1


class WorkersNotReached(Exception):
    """No worker process responded."""


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kcoord workers",
        description="Take one broker of several worker processes out of service (fence), or back (unfence). A fenced "
        "broker rejects clients, and other replicas lead its partitions.",
    )
    parser.add_argument("action", choices=(FENCE, UNFENCE))
    parser.add_argument("broker", type=whole_number(0), metavar="BROKER", help="the id of the broker")
    parser.add_argument("--data", required=True, metavar="DIR", help="the data folder (log.dirs)")
    parser.add_argument(
        "--timeout",
        type=seconds(may_be_0=False),
        default=10.0,
        metavar="SECONDS",
        help="timeout of the request (default 10)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")
    return parser


def main(arguments: Sequence[str]) -> int:
    options = make_parser().parse_args(arguments)
    wants_fence = options.action == FENCE
    try:
        error = set_fenced(options.data, options.broker, fenced=wants_fence, timeout_seconds=options.timeout)
    except (WorkersNotReached, OSError, DecodeError, FramingError) as failure:
        print(f"kcoord: {failure}", file=sys.stderr)
        return 1
    if error is not Errors.NONE:
        print(f"kcoord: {error.name}: {error.description}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps({"broker": options.broker, "fenced": wants_fence}))
    else:
        print(f"Broker {options.broker} is {'out of' if wants_fence else 'in'} service")
    return 0


def set_fenced(data: str, broker_id: int, *, fenced: bool, timeout_seconds: float) -> Errors:
    """Returns the error of the controller's response. Any worker forwards the request to the controller."""
    from kcoord.server.workers.peer_frames import MAX_FRAME_BYTES, PeerRequest, decode_response
    from kcoord_protocol.messages import BrokerHeartbeatRequest, BrokerHeartbeatResponse

    message = BrokerHeartbeatRequest(broker_id=broker_id, want_fence=fenced)
    request = PeerRequest(_CORRELATION_ID, message.api_key, 0, "kcoord-workers", "", "", message.encode(0))
    with _connect(data, timeout_seconds) as connection:
        connection.sendall(request.encode())
        reader = FrameReader(MAX_FRAME_BYTES)
        frames: list[bytes] = []
        while not frames:
            received = connection.recv(_RECEIVE_BYTES)
            if not received:
                raise WorkersNotReached("the worker process ended before it responded")
            frames = reader.feed(received)
    _, body = decode_response(frames[0])
    return Errors(BrokerHeartbeatResponse.decode(body, 0).error_code)


def _connect(data: str, timeout_seconds: float) -> socket.socket:
    """Connects to the first worker that accepts. The sockets are named by worker id; the controller's is the lowest."""
    from kcoord.storage.file_system import RealFileSystem
    from kcoord.storage.worker_checkpoints import read_sockets_folder

    folder = read_sockets_folder(RealFileSystem(), data)
    if folder is None or not os.path.isdir(folder):
        raise WorkersNotReached(f"no worker processes use {data}")
    for name in sorted(os.listdir(folder), key=int):
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout_seconds)
        try:
            connection.connect(os.path.join(folder, name))
        except OSError:
            connection.close()
            continue
        return connection
    raise WorkersNotReached(f"none of the worker processes of {data} can be reached")
