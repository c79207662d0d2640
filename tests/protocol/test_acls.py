# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from kcoord_protocol.acls import AclOperation, PatternType, PermissionType, ResourceType


def test_codes_without_a_name_are_unknown() -> None:
    assert AclOperation(99) is AclOperation.UNKNOWN
    assert ResourceType(-1) is ResourceType.UNKNOWN
    assert PatternType(5) is PatternType.UNKNOWN
    assert PermissionType(4) is PermissionType.UNKNOWN


def test_titles_are_those_of_kafkas_tools() -> None:
    assert AclOperation.DESCRIBE_CONFIGS.title == "DescribeConfigs"
    assert ResourceType.TRANSACTIONAL_ID.title == "TransactionalId"
