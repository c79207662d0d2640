# SPDX-License-Identifier: Apache-2.0
"""The errors of calls to a test broker."""

from __future__ import annotations


class ControlError(Exception):
    """A request to the control of a test broker failed. `status` is the HTTP status of the response."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.text = text
        self.status = status


class WaitTimeout(ControlError, TimeoutError):
    """A wait timed out. The text has the state at that time."""

    def __init__(self, text: str) -> None:
        super().__init__(text, 408)
