# SPDX-License-Identifier: Apache-2.0
"""What bytes that are no Kafka request may be: a client with the wrong settings is the usual reason for nonsense."""

from __future__ import annotations

from typing import Final

_HTTP_METHODS: Final = (b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"OPTI", b"CONN", b"PATC", b"PRI ")


def guess_protocol(data: bytes) -> str:
    """A remark for the log; empty if the bytes look like nothing known."""
    if data[:2] == b"\x16\x03":
        return " (looks like a TLS handshake: the client uses SSL, this listener is PLAINTEXT)"
    if data[:4] in _HTTP_METHODS:
        return " (looks like HTTP)"
    return ""
