# SPDX-License-Identifier: Apache-2.0
"""Bit fields of the operations that a client may perform on a resource. Bit n stands for the operation with code n."""

from __future__ import annotations

from typing import Final

from kcoord.server.api.authorization import Rights
from kcoord_protocol.acls import CLUSTER_NAME, OPERATIONS, AclOperation, ResourceType

NOT_ASKED: Final = -(2**31)
NO_AUTHORIZER: Final = "No Authorizer is configured."
"""Kafka's error message for requests that create or delete ACLs."""

_ALL: Final = {kind: sum(1 << operation for operation in operations) for kind, operations in OPERATIONS.items()}


def operations_on(rights: Rights | None, resource_type: ResourceType, name: str) -> int:
    """Returns the operations that the client may perform on a resource: all of them if there is no authorizer."""
    if rights is None:
        return _ALL[resource_type]
    return rights.operations(OPERATIONS[resource_type], resource_type, name)


def operations_on_cluster(rights: Rights | None) -> int:
    """Returns the operations that the client may perform on the cluster; none if it may not describe the cluster."""
    if rights is not None and not rights.allows_cluster(AclOperation.DESCRIBE):
        return 0
    return operations_on(rights, ResourceType.CLUSTER, CLUSTER_NAME)
