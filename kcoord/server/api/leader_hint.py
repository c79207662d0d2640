# SPDX-License-Identifier: Apache-2.0
"""Where brokers are reached: all of them for Metadata, a partition's leader for Produce (v10) and Fetch (v16), which
tell a client that asked the wrong broker (KIP-951).
"""

from __future__ import annotations

from kcoord.metadata.image import BrokerImage
from kcoord.server.broker import Broker


def leader_endpoint(broker: Broker, leader_id: int, listener_name: str) -> tuple[str, int, str | None] | None:
    """Host, port and rack of a broker on the client's listener, None where it is not known."""
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
    """The same as `broker_addresses`, for the brokers that are out of service."""
    found = []
    for broker_id in sorted(broker.image.fenced_brokers()):
        endpoint = _endpoint_of(broker.image.brokers[broker_id], listener_name)
        if endpoint is not None:
            found.append((broker_id, *endpoint))
    return found


def broker_addresses(broker: Broker, listener_name: str) -> list[tuple[int, str, int, str | None]]:
    """Id, host, port and rack of all brokers in service that have the client's listener, by id."""
    found = []
    for broker_id in sorted(broker.image.brokers):
        endpoint = leader_endpoint(broker, broker_id, listener_name)
        if endpoint is not None:
            found.append((broker_id, *endpoint))
    return found
