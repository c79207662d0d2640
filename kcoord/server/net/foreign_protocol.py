# SPDX-License-Identifier: Apache-2.0
"""Recognizes other protocols by their first bytes. A client with wrong settings is the usual cause of invalid bytes."""

from __future__ import annotations

from typing import Final

_HTTP_METHODS: Final = (b"GET ", b"POST", b"PUT ", b"HEAD", b"DELE", b"OPTI", b"CONN", b"PATC", b"PRI ")


def guess_protocol(data: bytes) -> str:
    """Returns a remark for the log line, empty if the bytes look like no known protocol."""
    if data[:2] == b"\x16\x03":
        return " (looks like a TLS handshake: the client uses SSL, this listener is PLAINTEXT)"
    if data[:4] in _HTTP_METHODS:
        return " (looks like HTTP)"
    return ""
