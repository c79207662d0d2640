# SPDX-License-Identifier: Apache-2.0
"""Errors of the server that people read."""

from __future__ import annotations


class StartError(Exception):
    """Why the broker cannot start, in one sentence."""
