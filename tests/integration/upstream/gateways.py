# SPDX-License-Identifier: Apache-2.0
"""Gateways in front of one upstream, one after the other: each new one takes all groups from the one before."""

from __future__ import annotations

import pytest

from tests.support.kcoord_process import FAST, KcoordProcess

OPTIONAL = ("kcoord.upstream.import", "kcoord.upstream.request.timeout.ms")


class Gateways:
    """The gateways of one test module. `address` is that of the upstream."""

    def __init__(self, address: str, tmp_path_factory: pytest.TempPathFactory) -> None:
        self._address = address
        self._tmp_path_factory = tmp_path_factory
        self.made: list[KcoordProcess] = []

    def start(self, **settings: str) -> KcoordProcess:
        """Starts a gateway with an empty data folder. Keyword arguments are settings, with underscores for dots."""
        overrides = {
            **FAST,
            "kcoord.upstream.bootstrap.servers": self._address,
            "kcoord.upstream.ports": "0",
            **{key.replace("_", "."): text for key, text in settings.items()},
        }
        self.made.append(KcoordProcess(self._tmp_path_factory.mktemp("gateway"), overrides).start())
        return self.made[-1]

    def last(self, **settings: str) -> KcoordProcess:
        """Returns the gateway that has the groups if it has these settings, else a new one."""
        overrides = {key.replace("_", "."): text for key, text in settings.items()}
        if self.made and self.made[-1].is_running:
            own = self.made[-1].overrides
            if {key: text for key, text in own.items() if key.startswith(OPTIONAL)} == overrides:
                return self.made[-1]
        return self.start(**settings)

    def stop(self) -> None:
        """Kills all gateways that run."""
        for gateway in self.made:
            gateway.kill()
