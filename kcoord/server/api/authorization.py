# SPDX-License-Identifier: Apache-2.0
"""What the client of one request may do, by the ACLs of the moment.

A request path gives each request a `Rights` object if the broker has an authorizer. Without an authorizer, and for
requests of the broker itself and of other workers, `rights` is None and everything is allowed.
`kcoord.server.api.authorization_table` is the table of the checks of each API.

A change of ACLs makes a new authorizer. So rights are never kept longer than their request, with one exception: a fast
path keeps its authorizer and compares it for each request (`kcoord.server.fast.guarded`).

Decisions go to Kafka's audit logger with Kafka's text: denials at INFO, permissions at DEBUG. A decision that only
leaves something out of a response is no access: a denial is then logged at TRACE. Decisions that only show a client
what it may do are logged at TRACE, too. Of the denials of one request at INFO, the first MOST_LOGGED are logged. A
client without any right could otherwise fill the disk, and block other clients, with a few large requests.

If the broker has an audit log (`kcoord.server.observe.audit_log`), `Rights` keeps the decisions of its request for it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Iterable
from itertools import islice
from typing import Final

from kcoord.security.authorizer import Authorizer
from kcoord_protocol.acls import CLUSTER_NAME, AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError

audit_logger: Final = logging.getLogger("kafka.authorizer.logger")
TRACE: Final = 5
"""Kafka's level below DEBUG."""
logging.addLevelName(TRACE, "TRACE")
MOST_LOGGED: Final = 200
"""The number of denials of one request that are logged at INFO."""

ERRORS: Final = {
    ResourceType.TOPIC: (Errors.TOPIC_AUTHORIZATION_FAILED, "Topic authorization failed."),
    ResourceType.GROUP: (Errors.GROUP_AUTHORIZATION_FAILED, "Group authorization failed."),
    ResourceType.CLUSTER: (Errors.CLUSTER_AUTHORIZATION_FAILED, "Cluster authorization failed."),
    ResourceType.TRANSACTIONAL_ID: (
        Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        "Transactional Id authorization failed.",
    ),
    ResourceType.DELEGATION_TOKEN: (
        Errors.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
        "Delegation Token authorization failed.",
    ),
}
"""The error of a client that may not use a resource of a type, and Kafka's message."""


class Rights:
    """The rights of one client, for one request."""

    __slots__ = ("_api_key", "_authorizer", "_decided", "_denials", "_host", "_principal")

    def __init__(
        self, authorizer: Authorizer, principal: str, host: str, api_key: ApiKey, *, is_audited: bool = False
    ) -> None:
        self._authorizer = authorizer
        self._decided: dict[tuple[AclOperation, ResourceType, str], bool] | None = {} if is_audited else None
        """The decisions for the audit log; None if there is none."""
        self._denials = 0
        """Number of denials at INFO so far."""
        self._principal = principal
        self._host = host
        self._api_key = api_key

    def allows(
        self,
        operation: AclOperation,
        resource_type: ResourceType,
        name: str,
        *,
        logs_denial: bool = True,
        references: int = 1,
    ) -> bool:
        """Returns whether the client may perform the operation. The request names the resource `references` times."""
        allowed = self._authorizer.is_allowed(self._principal, self._host, operation, resource_type, name)
        if allowed:
            if audit_logger.isEnabledFor(logging.DEBUG):
                audit_logger.debug(self._decision(operation, resource_type, name, references))
        elif logs_denial:
            self._log_denial(operation, resource_type, name, references)
        elif audit_logger.isEnabledFor(TRACE):
            audit_logger.log(TRACE, self._decision(operation, resource_type, name, references))
        if self._decided is not None and (allowed or logs_denial):
            self._decided[operation, resource_type, name] = allowed
        return allowed

    def allows_cluster(self, operation: AclOperation, *, logs_denial: bool = True) -> bool:
        """Returns whether the client may perform the operation on the cluster."""
        return self.allows(operation, ResourceType.CLUSTER, CLUSTER_NAME, logs_denial=logs_denial)

    def allows_any(self, operation: AclOperation, resource_type: ResourceType) -> bool:
        """Returns whether the client may perform the operation on at least one resource of the type."""
        return self._authorizer.is_allowed_by_type(self._principal, self._host, operation, resource_type)

    def require(self, operation: AclOperation, resource_type: ResourceType, name: str) -> None:
        """Raises the error of the resource's type unless the client may perform the operation."""
        if not self.allows(operation, resource_type, name):
            raise denied(resource_type)

    def require_cluster(self, operation: AclOperation) -> None:
        """Raises CLUSTER_AUTHORIZATION_FAILED unless the client may perform the operation on the cluster."""
        self.require(operation, ResourceType.CLUSTER, CLUSTER_NAME)

    def allowed(
        self, operation: AclOperation, resource_type: ResourceType, names: Iterable[str], *, logs_denial: bool = True
    ) -> set[str]:
        """Returns the names of the resources on which the client may perform the operation."""
        return {
            name
            for name, count in Counter(names).items()
            if self.allows(operation, resource_type, name, logs_denial=logs_denial, references=count)
        }

    def operations(self, operations: Collection[AclOperation], resource_type: ResourceType, name: str) -> int:
        """Returns those of the operations that the client may perform, as bits. The decisions are logged at TRACE."""
        is_allowed = self._authorizer.is_allowed
        if audit_logger.isEnabledFor(TRACE):
            for operation in operations:
                audit_logger.log(TRACE, self._decision(operation, resource_type, name, 1))
        return sum(
            1 << operation
            for operation in operations
            if is_allowed(self._principal, self._host, operation, resource_type, name)
        )

    @property
    def is_denied(self) -> bool:
        """True if the request was denied an access. Always False if there is no audit log."""
        return self._decided is not None and not all(self._decided.values())

    def decisions(self, most: int, *, denials_only: bool) -> list[dict[str, object]]:
        """Returns the first decisions for the audit log, each with its rule."""
        decided = (item for item in (self._decided or {}).items() if not (item[1] and denials_only))
        return [
            {
                "operation": operation.name,
                "resourceType": resource_type.name,
                "resource": name,
                "allowed": allowed,
                "rule": str(self._authorizer.rule_of(self._principal, self._host, operation, resource_type, name)),
            }
            for (operation, resource_type, name), allowed in islice(decided, most)
        ]

    def _log_denial(self, operation: AclOperation, resource_type: ResourceType, name: str, references: int) -> None:
        self._denials += 1
        if self._denials <= MOST_LOGGED and audit_logger.isEnabledFor(logging.INFO):
            audit_logger.info(self._decision(operation, resource_type, name, references))
        elif self._denials == MOST_LOGGED + 1:
            text = "Principal = %s is denied more in this request = %s, which is left out here"
            audit_logger.info(text, self._principal, request_name(self._api_key))

    def _decision(self, operation: AclOperation, resource_type: ResourceType, name: str, references: int) -> str:
        """Returns Kafka's text about a decision."""
        rule = self._authorizer.rule_of(self._principal, self._host, operation, resource_type, name)
        return (
            f"Principal = {self._principal} is {'Allowed' if rule.is_allowed else 'Denied'} "
            f"operation = {operation.name} from host = {self._host} "
            f"on resource = {resource_type.title}:LITERAL:{name} for request = {request_name(self._api_key)} "
            f"with resourceRefCount = {references} based on rule {rule}"
        )


def request_name(api_key: ApiKey) -> str:
    """Returns the name of an API in Kafka's spelling, such as OffsetCommit."""
    return "".join(part.capitalize() for part in api_key.name.split("_"))


def denied(resource_type: ResourceType) -> KafkaError:
    """Returns the error of a client that may not use a resource of this type."""
    return KafkaError(*ERRORS[resource_type])
