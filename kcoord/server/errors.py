# SPDX-License-Identifier: Apache-2.0
"""The error of a start that fails."""

from __future__ import annotations


class StartError(Exception):
    """The broker cannot start. The text is one sentence for people."""
