# SPDX-License-Identifier: Apache-2.0
"""How the threads of a broker share its interpreter: whoever computes beside the event loop lets it in soon."""

from __future__ import annotations

import sys

SWITCH_SECONDS = 0.001
"""How long the event loop may have to wait while another thread computes; Python's own choice is five times that."""


def share_with_loop() -> None:
    """To be called before such a thread is started. It holds for the whole process."""
    sys.setswitchinterval(SWITCH_SECONDS)
