# SPDX-License-Identifier: Apache-2.0
"""Lists the logs that the log cleaner may clean, and what it has to know of each log. Runs in the event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from threading import Lock

from kcoord.config import BrokerConfig, TopicConfig
from kcoord.metadata.image import MetadataImage
from kcoord.server.disk.log_cleaner import CleanableLog
from kcoord.server.disk.shard_logs import ShardLogs
from kcoord.storage.cleaner import CleaningRules
from kcoord.storage.cleaning_pass import LastOfProducer
from kcoord.storage.errors import OpeningCanceledError
from kcoord.storage.replacement import OnOwner
from kcoord.topics.log_opening import Opening
from kcoord.topics.open_log import OpenLog
from kcoord.topics.partition import Partition
from kcoord.topics.store import TopicStore


def rules_of(config: TopicConfig) -> CleaningRules:
    """Returns the rules that the topic's configuration sets for the cleaner."""
    return CleaningRules(
        min_cleanable_dirty_ratio=config.min_cleanable_dirty_ratio,
        min_compaction_lag_ms=config.min_compaction_lag_ms,
        max_compaction_lag_ms=config.max_compaction_lag_ms,
        delete_retention_ms=config.delete_retention_ms,
    )


def of_topics(store: TopicStore, on_owner: OnOwner) -> list[CleanableLog]:
    """Returns the open partitions of compacted topics. The event loop writes to their logs."""
    return [_of_partition(partition, opened, on_owner) for partition, opened in store.compacted()]


def _of_partition(partition: Partition, opened: OpenLog, on_owner: OnOwner) -> CleanableLog:
    producers = {
        entry.producer_id: LastOfProducer(
            entry.batches[-1].last_offset if entry.batches else None, entry.producer_epoch
        )
        for entry in opened.producers.entries.values()
    }
    return CleanableLog(
        partition.topic,
        partition.index,
        opened.log,
        rules_of(partition.config),
        opened.last_stable_offset,
        on_owner,
        producers,
        partial(_forget_aborted, partition, opened, on_owner),
    )


def _forget_aborted(partition: Partition, opened: OpenLog, on_owner: OnOwner, marker_offsets: set[int]) -> None:
    """Makes a partition forget aborted transactions. Runs in the thread of the cleaner, which waits for the disk."""
    begun: list[Opening[int]] = []
    while True:
        on_owner(lambda: begun.append(partition.forget_aborted(opened, marker_offsets)))
        forgetting = begun.pop()
        forgetting.run()
        with suppress(OpeningCanceledError):
            if forgetting.has_ended:
                forgetting.result()
                return


def of_coordinator(
    topic: str,
    logs: ShardLogs,
    config: BrokerConfig,
    image: MetadataImage,
    forget_aborted: Callable[[int, set[int]], None],
    on_owner: OnOwner,
) -> list[CleanableLog]:
    """Returns the open logs of a coordinator's shards. Steps that change a log run under the lock of the log."""
    opened: Mapping[int, object] = logs.open_logs()
    if not opened:
        return []
    rules = rules_of(TopicConfig.resolve(config, image.topic_configs(topic)))
    return [
        CleanableLog(
            topic,
            shard_id,
            log,
            rules,
            log.end_offset,
            partial(_locked, logs.lock(shard_id), on_owner),
            forget_aborted=partial(
                _forget_producers, partial(_locked, logs.lock(shard_id), on_owner), shard_id, forget_aborted
            ),
            may_roll=True,
        )
        for shard_id, log in logs.open_logs().items()
    ]


def _forget_producers(
    on_owner: OnOwner, shard_id: int, forget_aborted: Callable[[int, set[int]], None], marker_offsets: set[int]
) -> None:
    on_owner(partial(forget_aborted, shard_id, marker_offsets))


def at_once(step: Callable[[], None]) -> None:
    """Runs a step in the thread of the cleaner, for logs that any thread may change under their locks."""
    step()


def _locked(lock: Lock, on_owner: OnOwner, step: Callable[[], None]) -> None:
    def run() -> None:
        with lock:
            step()

    on_owner(run)
