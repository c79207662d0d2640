# SPDX-License-Identifier: Apache-2.0
"""The name and version of the client's software, which it sends to brokers (KIP-511)."""

from __future__ import annotations

from typing import Final

from kcoord import __version__

SOFTWARE_NAME: Final = "kcoord"
SOFTWARE_VERSION: Final = __version__
