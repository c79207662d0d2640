# SPDX-License-Identifier: Apache-2.0
"""What is said to whoever asks a test broker for something that it cannot do."""

from __future__ import annotations


class ControlError(Exception):
    """A request to the control of a test broker that failed. `status` is the HTTP status that it stands for."""

    def __init__(self, text: str, status: int = 400) -> None:
        super().__init__(text)
        self.text = text
        self.status = status


class WaitTimeout(ControlError, TimeoutError):
    """What was waited for did not come in time; the text tells what there was instead."""

    def __init__(self, text: str) -> None:
        super().__init__(text, 408)
