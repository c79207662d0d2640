# SPDX-License-Identifier: Apache-2.0
"""kcoord: a Kafka group coordinator and broker in Python. Importing this package does nothing but name its version."""

from __future__ import annotations

__version__ = "0.1.0"
