# SPDX-License-Identifier: Apache-2.0
"""All tests of this folder run on virtual time, with connections in memory."""

from __future__ import annotations

from asyncio import AbstractEventLoop
from collections.abc import Callable, Mapping

from tests.unit.client.virtual_loop import VirtualLoop


def pytest_asyncio_loop_factories() -> Mapping[str, Callable[[], AbstractEventLoop]]:
    return {"virtual time": VirtualLoop}
