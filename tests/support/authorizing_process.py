# SPDX-License-Identifier: Apache-2.0
"""A broker process with an authorizer. Clients without authentication are a super user."""

from __future__ import annotations

from pathlib import Path

from kcoord.config.security import STANDARD_AUTHORIZER
from tests.support.kcoord_process import FAST, KcoordProcess


def authorizing_process(folder: Path, **configs: str) -> KcoordProcess:
    """Returns the process, which is not started. Keyword arguments are configs, with underscores for dots."""
    return KcoordProcess(
        folder,
        {
            **FAST,
            "authorizer.class.name": STANDARD_AUTHORIZER,
            "super.users": "User:ANONYMOUS",
            **{key.replace("_", "."): value for key, value in configs.items()},
        },
    )
