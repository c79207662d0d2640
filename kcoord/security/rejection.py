# SPDX-License-Identifier: Apache-2.0
"""The error of a login that a mechanism refuses."""

from __future__ import annotations

from typing import Final

OTHER_AUTHORIZATION_ID: Final = (
    "Authentication failed: Client requested an authorization id that is different from username"
)
"""Kafka's text for PLAIN and SCRAM."""


class Rejection(Exception):
    """A login is refused. The text is for the log and has no secrets.

    `client_text` goes to the client. If it is None, the client gets the general text, which does not say why.
    """

    def __init__(self, reason: str, client_text: str | None = None) -> None:
        super().__init__(reason)
        self.client_text = client_text
