# SPDX-License-Identifier: Apache-2.0
"""The broker's authorizer follows the ACLs of the image, and connections have the principal of their listener."""

from __future__ import annotations

import pytest

from kcoord.config.security import STANDARD_AUTHORIZER
from kcoord.metadata import records
from kcoord.metadata.image import GROUP_RESOURCE, ImageBuilder, MetadataImage
from kcoord.runtime.result import CoordinatorRecord
from kcoord.server.net.path_settings import PathSettings
from kcoord.server.net.request_path import RequestPath
from kcoord_protocol.acls import Acl, AclOperation, PatternType, PermissionType, ResourceType
from tests.unit.server.harness import Harness

ACL = Acl(
    ResourceType.TOPIC, "t", PatternType.LITERAL, "User:a", "192.0.2.0/24", AclOperation.READ, PermissionType.ALLOW
)


def with_record(image: MetadataImage, record: CoordinatorRecord) -> MetadataImage:
    builder = ImageBuilder(image)
    builder.replay(record)
    return builder.build()


async def test_without_an_authorizer_there_is_none() -> None:
    assert Harness().broker.authorizer is None


@pytest.mark.parametrize("release", ["4.3", "4.4"])
async def test_the_authorizer_is_replaced_when_acls_change_and_before_observers_see_the_image(release: str) -> None:
    broker = Harness(authorizer_class_name=STANDARD_AUTHORIZER, super_users="User:root", kcoord_release=release).broker
    first = broker.authorizer
    assert first is not None
    assert first.is_allowed("User:root", "192.0.2.1", AclOperation.READ, ResourceType.TOPIC, "t")
    assert not first.is_allowed("User:a", "192.0.2.1", AclOperation.READ, ResourceType.TOPIC, "t")
    broker.begin()
    seen = []
    broker.image_observers.insert(0, lambda image: seen.append((image, broker.authorizer)))
    other = with_record(broker.image, records.new_config_record(GROUP_RESOURCE, "g", "a", "1"))
    broker.on_metadata_update(other)
    assert seen == [(other, first)]
    changed = with_record(other, records.new_acl_record(b"a" * 16, ACL))
    broker.on_metadata_update(changed)
    second = broker.authorizer
    assert seen[1:] == [(changed, second)]
    assert second is not None
    is_range = release == "4.4"
    assert second.is_allowed("User:a", "192.0.2.1", AclOperation.READ, ResourceType.TOPIC, "t") is is_range
    broker.stop_waiting()


async def test_a_connection_has_the_principal_of_its_listener() -> None:
    for principals, principal in (("", "User:ANONYMOUS"), ("plaintext=User:alice", "User:alice")):
        broker = Harness(kcoord_listener_principals=principals).broker
        path = RequestPath(PathSettings.of(broker, "PLAINTEXT"), lambda: None)
        assert path.client.principal == principal
