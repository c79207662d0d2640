# SPDX-License-Identifier: Apache-2.0
"""SCRAM credentials of users by librdkafka's admin client and by kcoord's own."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient
from confluent_kafka.admin._scram import (
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialAlteration,
    UserScramCredentialUpsertion,
)

from kcoord import client
from kcoord_protocol.errors import Errors
from tests.support.kcoord_process import KcoordProcess

SHA_256 = client.ScramCredentialInfo(client.ScramMechanism.SCRAM_SHA_256)
SHA_512 = client.ScramCredentialInfo(client.ScramMechanism.SCRAM_SHA_512, 8192)


def described_by_confluent(admin: AdminClient, user: str) -> dict[int, int]:
    """Returns the iterations of a user's credentials by mechanism."""
    futures = admin.describe_user_scram_credentials([user])
    assert isinstance(futures, dict)
    return {info.mechanism.value: info.iterations for info in futures[user].result(20).scram_credential_infos}


async def test_confluent_and_kcoord_clients(broker: KcoordProcess) -> None:
    theirs = AdminClient({"bootstrap.servers": broker.address})
    info = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_512, 8192)
    upsertions: list[UserScramCredentialAlteration] = [
        UserScramCredentialUpsertion("ann", info, b"password", b"salt"),
        UserScramCredentialUpsertion("bob", info, b"password"),
    ]
    for future in theirs.alter_user_scram_credentials(upsertions).values():
        assert future.result(20) is None
    async with client.AdminClient(bootstrap_servers=broker.address) as ours:
        described = (await ours.describe_user_scram_credentials(["ann", "bob"])).all()
        assert described == {"ann": [SHA_512], "bob": [SHA_512]}
        deletion = client.UserScramCredentialDeletion("bob", client.ScramMechanism.SCRAM_SHA_512)
        changes: list[client.UserScramCredentialUpsertion | client.UserScramCredentialDeletion]
        changes = [client.UserScramCredentialUpsertion("ann", SHA_256, "password"), deletion]
        (await ours.alter_user_scram_credentials(changes)).all()
        assert (await ours.describe_user_scram_credentials())["ann"] == [SHA_256, SHA_512]
    assert described_by_confluent(theirs, "ann") == {1: 4096, 2: 8192}
    with pytest.raises(KafkaException) as caught:
        described_by_confluent(theirs, "bob")
    assert caught.value.args[0].code() == Errors.RESOURCE_NOT_FOUND
