# SPDX-License-Identifier: Apache-2.0
"""Composes a broker from its configuration, its data folder and its environment.

Processes, workers, test brokers and the simulation all compose their broker here. Nothing is started here: event loop,
clock, random ids and threads come from the environment, and shards are loaded after `Broker.begin`.

The order in which `compose` registers observers of images matters. Each new image becomes `Broker.image` first. Then
it goes to the dynamic configuration, the topic store and the coordinators.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kcoord.config import BrokerConfig, TopicConfig
from kcoord.config.keys import is_without_effect
from kcoord.config.principals import parse_super_users
from kcoord.coordinator.group.shard import GroupCoordinatorShard
from kcoord.metadata.image import MetadataImage
from kcoord.metadata.machine import MetadataMachine
from kcoord.runtime.loader import LoadError
from kcoord.runtime.serde import TRANSACTION_RECORDS, CoordinatorSerde
from kcoord.runtime.shard_loads import LONGEST_RELOAD_MS
from kcoord.runtime.shard_log import ShardLog
from kcoord.runtime.shard_set import ShardSet
from kcoord.server.api.api_table import build_api_table
from kcoord.server.api.transactional_produce import TransactionalProduce
from kcoord.server.broker import Broker
from kcoord.server.disk.data_folder import DataFolder
from kcoord.server.disk.log_writer import LogWriter, NewWriter
from kcoord.server.disk.shard_logs import LocalShardLog, ShardLogs
from kcoord.server.environment import Environment, NewPool, thread_pool
from kcoord.server.errors import StartError
from kcoord.server.shards.fetch_service import FetchService
from kcoord.server.shards.group_service import GroupService
from kcoord.server.shards.group_times import GroupTimes
from kcoord.server.shards.metadata_service import (
    METADATA_SHARD,
    LocalMetadataService,
    MetadataService,
    new_metadata_shards,
)
from kcoord.server.shards.peer_calls import NoPeers, PeerCalls
from kcoord.server.shards.shard_service import Pump
from kcoord.server.shards.transaction_service import TransactionService
from kcoord.storage.errors import StorageError
from kcoord.storage.segment import LogConfig
from kcoord_protocol.compression import Compression
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC, GROUP_METADATA_TOPIC, TRANSACTION_STATE_TOPIC

if TYPE_CHECKING:
    # Most brokers never coordinate a transaction, so their start does not import these modules.
    import asyncio

    from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard
    from kcoord.security.authorizer import Authorizer
    from kcoord.server.shards.own_assignors import OwnAssignor
    from kcoord.topics.store import TopicStore

_logger = logging.getLogger(__name__)

LONGEST_REMOTE_RELOAD_MS: Final = 5_000
"""A log in another cluster fails with that cluster. Groups are needed as soon as it is back."""
REMOTE_LOADS_AT_A_TIME: Final = 10

FOLDERS_PER_TURN: Final = 5
"""The number of folders of new partitions that one turn of the event loop makes. A slow disk takes 0.3 ms for each."""

FOLDER_REST_SECONDS: Final = 0.002
"""The time between two turns for folders."""

NewMetadata: TypeAlias = "Callable[[Broker, GroupTimes], MetadataService]"
NewGroupShard: TypeAlias = "Callable[[Broker, int], GroupCoordinatorShard]"
NewGroupLog: TypeAlias = "Callable[[ShardSet[GroupCoordinatorShard], Broker], ShardLog]"
NewTransactionShard: TypeAlias = "Callable[[Broker, int], TransactionCoordinatorShard]"


def new_group_shard(broker: Broker, shard_id: int) -> GroupCoordinatorShard:
    """Returns an empty shard of the group coordinator."""
    return GroupCoordinatorShard(broker.config, broker.image, broker.groups.counters, broker.groups.deleted_topics)


def new_transaction_shard(broker: Broker, shard_id: int) -> TransactionCoordinatorShard:
    """Returns an empty shard of the transaction coordinator, with the leader epoch of its partition."""
    from kcoord.coordinator.transaction.shard import TransactionCoordinatorShard

    partition = broker.image.partition(TRANSACTION_STATE_TOPIC, shard_id)
    epoch = partition.leader_epoch if partition is not None else 0
    return TransactionCoordinatorShard(broker.config, broker.image, epoch)


def _start_assignors(config: BrokerConfig) -> Mapping[str, OwnAssignor]:
    if not config.own_assignors:
        return {}
    from kcoord.server.shards.own_assignors import start_own_assignors

    return start_own_assignors(config)


def compose(
    config: BrokerConfig,
    environment: Environment,
    folder: DataFolder,
    *,
    new_metadata: NewMetadata | None = None,
    peers: PeerCalls | None = None,
    metadata_broker_id: int | None = None,
    new_group_shard: NewGroupShard = new_group_shard,
    new_group_log: NewGroupLog | None = None,
    new_transaction_shard: NewTransactionShard = new_transaction_shard,
    new_writer: NewWriter = LogWriter,
    start_assignors: Callable[[BrokerConfig], Mapping[str, OwnAssignor]] = _start_assignors,
) -> Broker:
    """Returns a broker that is ready for `begin`.

    `new_metadata` makes the metadata service. By default the metadata log is in the folder and is replayed here;
    StartError is raised if that fails. `peers`: the other brokers of the cluster. `metadata_broker_id`: the broker
    that writes the metadata log, by default this one. `start_assignors` returns the assignors of one's own by name.
    `new_group_log` makes the log of the groups, if that is not in the folder.
    """
    broker = Broker(config, environment, folder.cluster_id, metadata_broker_id)
    broker.apis = build_api_table(config)
    broker.topics = folder.topics
    broker.fetches = FetchService(folder.topics.fetches, environment.now_ms, environment.uuids)
    gathers = config.group_coordinator_append_linger_ms != 0
    pump = broker.pump = Pump(
        environment.loop, environment.now_ms, folder.journal, gathers=gathers, new_writer=new_writer
    )
    group_times = _group_times(broker)
    if new_metadata is not None:
        broker.metadata = new_metadata(broker, group_times)
    else:
        broker.metadata = local_metadata(folder, broker, group_times)
    broker.image = broker.metadata.image
    broker.authorizer = _authorizer(config, broker.image)
    broker.metadata.publishers.append(broker.on_metadata_update)
    broker.groups = _group_service(
        broker, environment, folder, group_times, new_group_shard, new_group_log, start_assignors(config)
    )
    broker.transactions = _transaction_service(
        broker, environment, folder, peers if peers is not None else NoPeers(), new_transaction_shard
    )
    broker.transactional_produce = TransactionalProduce(config, folder.topics, broker.transactions, environment)
    if isinstance(broker.metadata, LocalMetadataService):
        pump.add(broker.metadata)
    pump.add(broker.groups)
    pump.add(broker.transactions)
    for service in (broker.groups, broker.transactions):
        service.release_observers.append(lambda: broker.update_coordinators(broker.image))
    broker.image_observers += [
        DynamicConfigs(broker).follow,
        partial(_follow_quotas, broker, environment),
        lambda image: folder.topics.on_metadata_update(image, environment.now_ms()),
        FolderTurns(folder.topics, environment.loop).follow,
        broker.update_coordinators,
    ]
    return broker


def _authorizer(config: BrokerConfig, image: MetadataImage) -> Authorizer | None:
    if not config.authorizer_class_name:
        return None
    from kcoord.security.authorizer import Authorizer

    return Authorizer(
        image.acls,
        super_users=parse_super_users(config.super_users),
        allow_everyone=config.allow_everyone_if_no_acl_found,
        matches_cidr=config.is_kafka_4_4,
    )


def _follow_quotas(broker: Broker, environment: Environment, image: MetadataImage) -> None:
    """Makes the quotas of an image the broker's. A broker without quotas has no `ClientQuotas`."""
    if not image.client_quotas:
        broker.quotas = broker.request_quota = None
        return
    if broker.quotas is None:
        # Most brokers have no quotas, so their start does not import this module.
        from kcoord.server.client_quotas import ClientQuotas

        broker.quotas = ClientQuotas(broker.config)
    if broker.quotas.applied is not image.client_quotas:
        broker.quotas.apply(image.client_quotas)
        _follow_request_quota(broker, environment, image)


def _follow_request_quota(broker: Broker, environment: Environment, image: MetadataImage) -> None:
    from kcoord.metadata.client_quotas import REQUEST_PERCENTAGE

    if not any(REQUEST_PERCENTAGE in values for values in image.client_quotas.values()):
        broker.request_quota = None
        return
    if broker.request_quota is None:
        from kcoord.server.request_quota import RequestQuota

        broker.request_quota = RequestQuota(broker.config, environment.cpu_ns)
    broker.request_quota.change_limits(image.client_quotas)


def load_metadata(config: BrokerConfig, folder: DataFolder, now_ms: int) -> ShardSet[MetadataMachine]:
    """Replays the metadata log and returns its shard set. Raises StartError if the log cannot be read."""
    shards = new_metadata_shards(config)
    log = folder.metadata_logs.open(METADATA_SHARD)
    try:
        shards.load(METADATA_SHARD, log.batches(log.start_offset), now_ms, log.end_offset)
    except (OSError, StorageError, LoadError) as error:
        raise StartError(f"{CLUSTER_METADATA_TOPIC} cannot be read: {error}") from None
    return shards


def local_metadata(
    folder: DataFolder,
    broker: Broker,
    group_times: GroupTimes,
    new_service: Callable[..., LocalMetadataService] = LocalMetadataService,
) -> LocalMetadataService:
    """Returns the metadata service of the broker that writes the metadata log."""
    shards = load_metadata(broker.config, folder, broker.now_ms())
    return new_service(
        shards,
        local_log(shards, folder.metadata_logs, broker),
        broker.pump.wake,
        broker.now_ms,
        lambda: broker.groups.latest_creation_time_ms(),
        group_times,
    )


def local_log(shards: ShardSet[Any], logs: ShardLogs, broker: Broker, new_pool: NewPool = thread_pool) -> LocalShardLog:
    """Returns the log of shards in the broker's data folder."""

    def tombstones_kept_ms() -> int:
        configs = broker.image.topic_configs(GROUP_METADATA_TOPIC)
        return TopicConfig.resolve(broker.config, configs).delete_retention_ms

    return LocalShardLog(
        shards,
        logs,
        submit=broker.pump.submit,
        wake=broker.pump.wake,
        now_ms=broker.now_ms,
        tombstones_kept_ms=tombstones_kept_ms,
        new_pool=new_pool,
    )


def _group_times(broker: Broker) -> GroupTimes:
    def newest_ms() -> int:
        """Returns the latest creation time that a group of this process has, or could get now."""
        latest_ms = broker.groups.latest_creation_time_ms()
        return max(broker.now_ms(), latest_ms, broker.metadata.image.last_creation_time_ms)

    return GroupTimes(newest_ms, lambda: not broker.has_begun or broker.groups.is_loading)


def _group_service(
    broker: Broker,
    environment: Environment,
    folder: DataFolder,
    group_times: GroupTimes,
    new_shard: NewGroupShard,
    new_log: NewGroupLog | None,
    own_assignors: Mapping[str, OwnAssignor],
) -> GroupService:
    config = broker.config
    is_remote = new_log is not None
    shards = ShardSet(
        lambda shard_id: new_shard(broker, shard_id),
        CoordinatorSerde(),
        name="groups",
        configured_shards=config.offsets_topic_num_partitions,
        compression=Compression(config.offsets_topic_compression_codec),
        linger_ms=config.group_coordinator_append_linger_ms,
        longest_reload_ms=LONGEST_REMOTE_RELOAD_MS if is_remote else LONGEST_RELOAD_MS,
        loads_at_a_time=REMOTE_LOADS_AT_A_TIME if is_remote else 1,
    )
    log: ShardLog
    if new_log is not None:
        log = new_log(shards, broker)
    else:
        log_config = LogConfig(segment_bytes=config.offsets_topic_segment_bytes)
        logs = folder.shard_logs(GROUP_METADATA_TOPIC, log_config, broker.now_ms)
        log = local_log(shards, logs, broker, environment.new_pool)
    groups = GroupService(
        shards,
        log,
        environment,
        lambda: broker.image,
        broker.pump.wake,
        background_threads=config.group_coordinator_background_threads,
        write_timeout_ms=config.offsets_commit_timeout_ms,
        creation_limits=group_times.limits,
        own_assignors=own_assignors,
    )
    folder.topics.fetches.follow_shards(GROUP_METADATA_TOPIC, shards.append_observers)
    return groups


def _transaction_service(
    broker: Broker,
    environment: Environment,
    folder: DataFolder,
    peers: PeerCalls,
    new_shard: NewTransactionShard,
) -> TransactionService:
    config = broker.config
    log_config = LogConfig(segment_bytes=config.transaction_state_log_segment_bytes)
    shards = ShardSet(
        lambda shard_id: new_shard(broker, shard_id),
        CoordinatorSerde(TRANSACTION_RECORDS),
        name="transactions",
        configured_shards=config.transaction_state_log_num_partitions,
    )
    logs = folder.shard_logs(TRANSACTION_STATE_TOPIC, log_config, broker.now_ms)
    folder.topics.fetches.follow_shards(TRANSACTION_STATE_TOPIC, shards.append_observers)
    return TransactionService(
        shards,
        local_log(shards, logs, broker, environment.new_pool),
        environment,
        lambda: broker.image,
        broker.pump.wake,
        folder.topics,
        broker.groups,
        node_id=config.node_id,
        peers=peers,
    )


class FolderTurns:
    """Makes and renames the folders of new and deleted partitions, a few of them at a time.

    Requests and loading shards go before them.
    """

    def __init__(self, topics: TopicStore, loop: asyncio.AbstractEventLoop) -> None:
        self._topics = topics
        self._loop = loop
        self._has_turn = False

    def follow(self, image: MetadataImage) -> None:
        """Begins with the changes of a new image."""
        if not self._has_turn:
            self._has_turn = True
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self._has_turn = self._topics.settle_folders(FOLDERS_PER_TURN)
        if self._has_turn:
            self._loop.call_later(FOLDER_REST_SECONDS, self._turn)


class DynamicConfigs:
    """Applies the dynamic configuration that an image has for this broker."""

    def __init__(self, broker: Broker) -> None:
        self._broker = broker
        self._applied: Mapping[str, str] = {}

    def follow(self, image: MetadataImage) -> None:
        """Applies the dynamic configs of an image, if they have changed.

        Most keys are read whenever they are needed. The API table is computed from keys, so it is built again.
        """
        broker = self._broker
        dynamic = image.effective_broker_configs(broker.node_id)
        if dynamic == self._applied:
            return
        changed = [name for name, value in dynamic.items() if self._applied.get(name) != value]
        ignored = sorted(filter(is_without_effect, changed))
        if ignored:
            _logger.info("Dynamic configs that were accepted, but are without effect: %s", ", ".join(ignored))
        self._applied = dynamic
        broker.config.apply_dynamic(dynamic)
        left_out = sorted(dynamic.keys() - broker.config.dynamic.keys())
        if left_out:
            _logger.warning("Dynamic configs with values that cannot be used were ignored: %s", ", ".join(left_out))
        # New connections use this table. It has the APIs of client telemetry only if they are enabled.
        broker.apis = build_api_table(broker.config)
