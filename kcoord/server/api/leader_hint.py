# SPDX-License-Identifier: Apache-2.0
"""The addresses of brokers for responses.

Metadata lists all brokers. Produce (v10) and Fetch (v16) add the leader's address if the client sent the request to
another broker (KIP-951).
"""

from __future__ import annotations

from kcoord.metadata.image import BrokerImage
from kcoord.server.broker import Broker


def leader_endpoint(broker: Broker, leader_id: int, listener_name: str) -> tuple[str, int, str | None] | None:
    """Returns host, port and rack of a broker on the client's listener, None if it is unknown or out of service."""
    if leader_id == broker.node_id and listener_name in broker.endpoints:
        own = broker.endpoints[listener_name]
        return own.host, own.port, broker.config.broker_rack
    image = broker.image.brokers.get(leader_id)
    return None if image is None or image.fenced else _endpoint_of(image, listener_name)


def _endpoint_of(image: BrokerImage, listener_name: str) -> tuple[str, int, str | None] | None:
    for name, host, port, _ in image.endpoints:
        if name == listener_name:
            return host, port, image.rack
    return None


def fenced_addresses(broker: Broker, listener_name: str) -> list[tuple[int, str, int, str | None]]:
    """Returns the same as `broker_addresses`, for the brokers that are out of service."""
    addresses = []
    for broker_id in sorted(broker.image.fenced_brokers()):
        endpoint = _endpoint_of(broker.image.brokers[broker_id], listener_name)
        if endpoint is not None:
            addresses.append((broker_id, *endpoint))
    return addresses


def broker_addresses(broker: Broker, listener_name: str) -> list[tuple[int, str, int, str | None]]:
    """Returns id, host, port and rack of all brokers in service that have the client's listener, ordered by id."""
    addresses = []
    for broker_id in sorted(broker.image.brokers):
        endpoint = leader_endpoint(broker, broker_id, listener_name)
        if endpoint is not None:
            addresses.append((broker_id, *endpoint))
    return addresses
