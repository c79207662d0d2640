# SPDX-License-Identifier: Apache-2.0
"""A broker may open as many files as the system allows, and connections leave some of them to logs."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator

import pytest

from kcoord.config import BrokerConfig
from kcoord.server import open_files
from kcoord.server.net.connection_limits import ConnectionLimits

SetSoftLimit = Callable[[int], None]


@pytest.fixture
def set_soft_limit() -> Iterator[SetSoftLimit]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield lambda limit: resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_the_soft_limit_becomes_the_hard_limit(set_soft_limit: SetSoftLimit) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    set_soft_limit(1024)
    open_files.raise_limit()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)


@pytest.mark.parametrize(("limit", "last"), [(400, 299), (1024, 895), (20_000, 19_871)])
def test_connections_leave_descriptors_to_logs(limit: int, last: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_files, "soft_limit", lambda: limit)
    limits = ConnectionLimits(BrokerConfig.from_properties({}))
    for _ in range(limit // 4):
        # Logs may have the low descriptors.
        assert limits.refusal("10.0.0.1", 0.0, last + 1) is None
    assert limits.refusal("10.0.0.1", 0.0, last) is None
    refusal = limits.refusal("10.0.0.1", 0.0, last + 1)
    assert refusal == f"the process may have {limit} open files (ulimit -n), and the last are for logs"
