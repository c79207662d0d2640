# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from kcoord.cli.serve import _config


def test_fixed_principals_of_listeners_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    _config({"kcoord.listener.principals": "PLAINTEXT=User:alice", "principal.builder.class": "org.example.Names"})
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == [
        "Every client of listener PLAINTEXT is User:alice without authentication (kcoord.listener.principals)",
        "kcoord does not load org.example.Names (principal.builder.class): use kcoord.listener.principals",
    ]
