# SPDX-License-Identifier: Apache-2.0
"""Which clients may send requests about delegation tokens (KIP-48)."""

from __future__ import annotations

from kcoord.config.listeners import SecurityProtocol
from kcoord.server.api.api_table import ANONYMOUS, RequestContext
from kcoord.server.broker import Broker


def allows_token_requests(broker: Broker, context: RequestContext) -> bool:
    """Returns whether the client has proven who it is, and not with a delegation token.

    Otherwise a stolen token would be good for further tokens without end.
    """
    client = context.client
    if not client.listener_name:
        # Another worker has checked its client, and passes the request on to the controller.
        return True
    protocol = broker.endpoints[client.listener_name].security_protocol
    if client.is_token_authenticated or protocol is SecurityProtocol.PLAINTEXT:
        return False
    return protocol is not SecurityProtocol.SSL or client.principal != ANONYMOUS
