# SPDX-License-Identifier: Apache-2.0
"""The reasons for which a request path works on no further request, and its connection does not read."""

from __future__ import annotations

from enum import IntEnum


class Mute(IntEnum):
    """A reason that begins with `RequestPath.mute` and ends with `unmute`. Each is one bit, since several may hold.

    A path is muted, too, while MAX_IN_FLIGHT_REQUESTS are unanswered, or responses of MAX_READY_BYTES wait.
    """

    STOPPED = 1
    """The path accepts no request any more. This reason never ends."""
    NEXT_TURN = 2
    """More requests wait than one turn may process, by their number, their time, or the size of their responses."""
    THROTTLED = 4
    """The client is above its quota."""
    ORDER = 8
    """The handler of a request has to finish before the next one begins (`Client.keeps_order`)."""
    SLOW_READER = 16
    """The client reads its responses too slowly: `pause_writing` until `resume_writing`."""
    SENDING = 32
    """Parts of files are being sent (`kcoord.server.net.piece_sender`)."""
    HELD = 64
    """The connection came faster than a limit on new connections allows. With TLS, its handshake has not begun."""
    LINK = 128
    """The upstream takes no bytes (`kcoord.upstream.link`)."""
    LOGIN = 256
    """The upstream has to answer a request of the login."""
    EARLIER_RESPONSE = 512
    """A response of kcoord, which is not ready, has to leave before the next response of the upstream."""
