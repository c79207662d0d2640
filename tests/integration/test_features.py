# SPDX-License-Identifier: Apache-2.0
"""Feature levels that change while the broker runs: they take effect on open connections at once, and are durable."""

from __future__ import annotations

from kcoord.client import AdminClient, FeatureUpdate, Producer, UpgradeType
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    UpdateFeaturesRequest,
    UpdateFeaturesResponse,
)
from tests.integration.conftest import MakeServer
from tests.integration.test_server import commit, committed, create_topic, find_coordinator, join
from tests.integration.wire import WireClient
from tests.support.command_line import CommandLine
from tests.support.kcoord_process import KcoordProcess

SAFE_DOWNGRADE = 2


def levels(client: WireClient) -> tuple[dict[str, int], int]:
    """Returns the finalized levels and their epoch on this connection."""
    request = ApiVersionsRequest(client_software_name="test", client_software_version="1.0")
    answer = client.call(request, 4, ApiVersionsResponse)
    finalized = {feature.name: feature.max_version_level for feature in answer.finalized_features}
    return finalized, answer.finalized_features_epoch


def update(client: WireClient, upgrade_type: int = 1, **updates: int) -> UpdateFeaturesResponse:
    keys = [
        UpdateFeaturesRequest.FeatureUpdateKey(
            feature=name.replace("_", "."), max_version_level=level, upgrade_type=upgrade_type
        )
        for name, level in updates.items()
    ]
    return client.call(UpdateFeaturesRequest(feature_updates=keys), 2, UpdateFeaturesResponse)


def load_groups(client: WireClient) -> None:
    """Waits until the coordinator serves groups."""
    find_coordinator(client, "g")
    committed(client, "g")


def test_group_version_0_disables_the_consumer_protocol(server: KcoordProcess) -> None:
    with WireClient(server.port) as member, WireClient(server.port) as admin:
        create_topic(admin, "t", 1)
        load_groups(admin)
        joined = join(member, "g", "m", "t")
        assert joined.error_code == 0
        for _ in range(3):
            # Repeated heartbeats take the fast path.
            assert join(member, "g", "m", "t", joined.member_epoch).error_code == 0
        before, old_epoch = levels(member)
        assert before["group.version"] == 1
        assert update(admin, SAFE_DOWNGRADE, group_version=0).error_code == 0
        after, epoch = levels(member)
        assert "group.version" not in after
        assert epoch > old_epoch
        assert join(member, "g", "m", "t", joined.member_epoch).error_code == Errors.UNSUPPORTED_VERSION
        assert join(admin, "g2", "m", "t").error_code == Errors.UNSUPPORTED_VERSION
        described = admin.call(ConsumerGroupDescribeRequest(group_ids=["g"]), 1, ConsumerGroupDescribeResponse)
        assert [group.error_code for group in described.groups] == [Errors.UNSUPPORTED_VERSION]
        assert commit(admin, "classic", "t", {0: 7}) == {0: 0}
        assert update(admin, group_version=1).error_code == 0
        assert join(member, "g", "m", "t", joined.member_epoch).error_code == 0


def test_levels_and_their_epoch_survive_restarts(server: KcoordProcess) -> None:
    with WireClient(server.port) as client:
        assert update(client, SAFE_DOWNGRADE, group_version=0, transaction_version=1).error_code == 0
        before, old_epoch = levels(client)
        load_groups(client)
    for _ in range(2):
        server.restart()
        with WireClient(server.port) as client:
            after, epoch = levels(client)
            assert after == before == {"metadata.version": 30, "transaction.version": 1}
            assert epoch >= old_epoch
            old_epoch = epoch
            assert join(client, "g", "m", "t").error_code == Errors.UNSUPPORTED_VERSION


async def test_transaction_version_selects_the_protocol_of_producers(make_server: MakeServer) -> None:
    """From level 2 on, each transaction ends with a new producer epoch (KIP-890)."""
    server = make_server(transaction_state_log_num_partitions="1").start()
    async with AdminClient(bootstrap_servers=server.address) as admin:
        with WireClient(server.port) as client:
            create_topic(client, "t", 1)
        assert await epochs_of_two_transactions(server, "second") == [1, 2]
        assert (await admin.describe_features()).finalized["transaction.version"] == 2
        lower = {"transaction.version": FeatureUpdate(1, UpgradeType.SAFE_DOWNGRADE)}
        (await admin.update_features(lower, validate_only=True)).all()
        assert (await admin.describe_features()).finalized["transaction.version"] == 2
        (await admin.update_features(lower)).all()
        described = await admin.describe_features()
        assert described.finalized["transaction.version"] == 1
        assert described.supported["transaction.version"] == (0, 2)
        assert await epochs_of_two_transactions(server, "first") == [0, 0]
        higher = {"transaction.version": FeatureUpdate(2), "nope": FeatureUpdate(1)}
        refused = await admin.update_features(higher)
        assert {name: str(error.error.name) for name, error in refused.errors.items()} == dict.fromkeys(
            higher, "INVALID_UPDATE_VERSION"
        )
        (await admin.update_features({"transaction.version": FeatureUpdate(2)})).all()
        assert await epochs_of_two_transactions(server, "first") == [2, 3]


async def epochs_of_two_transactions(server: KcoordProcess, transactional_id: str) -> list[int]:
    """Returns the producer's epoch after each transaction."""
    epochs = []
    async with Producer(bootstrap_servers=server.address, transactional_id=transactional_id) as producer:
        await producer.init_transactions()
        for _ in range(2):
            await producer.begin_transaction()
            await producer.send("t", b"value")
            await producer.commit_transaction()
            with WireClient(server.port) as client:
                request = DescribeTransactionsRequest(transactional_ids=[transactional_id])
                (state,) = client.call(request, 0, DescribeTransactionsResponse).transaction_states
            epochs.append(state.producer_epoch)
    return epochs


def test_the_command(server: KcoordProcess) -> None:
    kcoord = CommandLine(server.address)
    assert kcoord.succeed("features", "downgrade", "--feature", "group.version=0").out == (
        "group.version was downgraded to 0.\n"
    )
    failed = kcoord.run("features", "upgrade", "--feature", "group.version=2", "--dry-run")
    assert (failed.code, failed.err) == (1, "1 out of 1 operation(s) failed.\n")
    assert failed.out.startswith("Can not upgrade group.version to 2. The update failed for all features since ")
    assert kcoord.succeed("features", "upgrade", "--feature", "group.version=1", "--dry-run").out == (
        "group.version can be upgraded to 1.\n"
    )
    described = kcoord.succeed("features", "describe").out.splitlines()
    assert [line.split()[-3] for line in described if " group.version " in line] == ["0"]
    assert kcoord.succeed("features", "upgrade", "--feature", "group.version=1").code == 0
    assert kcoord.succeed("features", "disable", "--feature", "transaction.version").out == (
        "transaction.version was disabled.\n"
    )
    with WireClient(server.port) as client:
        assert levels(client)[0] == {"metadata.version": 30, "group.version": 1}
