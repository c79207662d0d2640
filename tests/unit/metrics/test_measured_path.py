# SPDX-License-Identifier: Apache-2.0
"""Clients choose the API key and version of a request. They cannot add rows to the metrics with that."""

from __future__ import annotations

import struct

from kcoord.metrics.measures import RequestMeasures
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.observe.broker_metrics import MeasuredPath
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.messages import ListGroupsRequest, ListGroupsResponse
from tests.unit.server.people import Person, running_cluster


def frame(key: int, version: int) -> bytes:
    """Returns a request with an empty body."""
    request = struct.pack(">hhih", key, version, 7, -1)
    return struct.pack(">i", len(request)) + request


async def test_requests_that_are_not_served_are_not_measured() -> None:
    requests = RequestMeasures()
    async with running_cluster() as cluster:
        alice = Person(cluster.broker, "User:alice")
        settings, on_response = PathSettings.of(cluster.broker, "PLAINTEXT"), alice.path._on_response
        for key, version in ((999, 0), (-1, 0), (ApiKey.METADATA, 99)):
            path = MeasuredPath(requests, settings, on_response)
            path.receive(frame(key, version))
            assert path.is_stopped
        path = MeasuredPath(requests, settings, on_response)
        for version in range(100, 2000):
            path.receive(frame(ApiKey.API_VERSIONS, version))
            assert path.take_output(), "the response lists the versions"
        assert requests.items() == []
        alice.path = MeasuredPath(requests, settings, on_response)
        await alice.ask(ListGroupsRequest(), 5, ListGroupsResponse)
        assert [(key, version) for key, version, _ in requests.items()] == [(ApiKey.LIST_GROUPS, 5)]
