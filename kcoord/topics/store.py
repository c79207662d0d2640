# SPDX-License-Identifier: Apache-2.0
"""All topic partitions that a broker leads.

Follows the metadata image, routes requests to partitions, and does the periodic work.

Who calls what: the metadata log's owner calls `on_metadata_update` with every new image, request handlers call the
methods under "requests", and a timer calls `tick`. All calls come from the event loop and are synchronous, so a call
sees one image from its beginning to its end. `keep_deleted` is the exception: it may run in any thread.

The life of a partition here:

* The image names this broker as leader: the partition is made. The log is opened at its first use.
* The image names another leader: the log is made durable, closed and handed over to that broker. Parked fetches are
  woken and fail with NOT_LEADER_OR_FOLLOWER.
* The topic is deleted: no request finds the partition any more. The folder is renamed, and removed later. A new topic
  of that name has another id, so it gets a new, empty folder.

A request may create or delete thousands of partitions, so `settle_folders` makes and renames a few folders in each turn
of the event loop. If a partition is used or made again earlier, its folder does not wait for its turn.

A crash can come between a change in the metadata log and these steps. The first image after a start therefore sets
folders aside that belong to no topic of the image. A broker that gets a partition from a broker that died uses what all
brokers have written about the log (`LogDir.note_gained`).

Partitions of internal topics belong to their coordinators. They are only read here, through the `internal_log` hook.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Final, TypeAlias

from kcoord.config import BrokerConfig, ConfigValue, TopicConfig
from kcoord.metadata.image import MetadataImage, PartitionImage, TopicImage
from kcoord.runtime.result import Producer
from kcoord.storage.errors import PartitionHeldError
from kcoord.storage.file_system import FileSystem
from kcoord.storage.log import Log
from kcoord.storage.log_dir import STRAY_SUFFIX, LogDir
from kcoord.storage.rolled import Background, NewLock
from kcoord.topics import internal_partition
from kcoord.topics.fetch_manager import FetchManager, ReadResult
from kcoord.topics.fetch_session import FetchPartition
from kcoord.topics.housekeeping import Housekeeping
from kcoord.topics.internal_partition import InternalProducers
from kcoord.topics.leader_epochs import UNDEFINED_EPOCH
from kcoord.topics.log_opening import Opening, Openings
from kcoord.topics.offset_queries import FoundOffset
from kcoord.topics.open_log import OpenLog
from kcoord.topics.partition import AppendResult, Marker, Partition, Verified
from kcoord.topics.producer_ids import ProducerIds
from kcoord.topics.producer_state import ProducerEntry
from kcoord_protocol.batch_header import Buffer
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC
from kcoord_protocol.uuid import ZERO_UUID

ACKS_ALL: Final = -1
VALID_ACKS: Final = (ACKS_ALL, 0, 1)

RETIRED_AT_ONCE: Final = 100
"""The number of folders of deleted partitions that are renamed at once. The data folder is synced once for all."""

InternalLog: TypeAlias = "Callable[[str, int], Log | None]"

_logger = logging.getLogger(__name__)


def _no_internal_log(topic: str, partition: int) -> Log | None:
    return None


def _at_once(work: Callable[[], None], done: Callable[[], None] | None) -> None:
    work()
    if done is not None:
        done()


class TopicStore:
    """The partitions of one broker. The module text describes who calls it, and the life of a partition.

    `settles_folder`: no other worker uses the data folder yet. `in_background` runs functions in another thread,
    and `new_lock` returns a lock for them.
    """

    def __init__(
        self,
        fs: FileSystem,
        log_dir: LogDir,
        config: BrokerConfig,
        *,
        internal_log: InternalLog = _no_internal_log,
        settles_folder: bool = True,
        in_background: Background = _at_once,
        new_lock: NewLock = nullcontext,
    ) -> None:
        self.config = config
        self.producer_ids = ProducerIds()
        self.fetches = FetchManager(
            self, config.node_id, config.max_incremental_fetch_session_cache_slots, config.fetch_max_bytes
        )
        self.internal_log = internal_log
        self._settles_folder = settles_folder
        self._openings = Openings(in_background, new_lock, self.fetches.on_change)
        self._internal_producers = InternalProducers(self._openings)
        self._fs = fs
        self._log_dir = log_dir
        self._image: MetadataImage | None = None
        self._defaults: Mapping[str, ConfigValue] = {}
        """The configs of a topic that sets none."""
        self._partitions: dict[tuple[str, int], Partition] = {}
        self._with_folder: set[tuple[str, int]] = set()
        """The partitions that have a folder, while the first image is applied."""
        self._without_folder: deque[Partition] = deque()
        self._to_retire: dict[tuple[str, int], tuple[str, int]] = {}
        """The folders of deleted partitions: the unique text for the new name, and the time of the deletion."""
        self._housekeeping = Housekeeping(config, log_dir, self._partitions, in_background)

    # --- metadata -----------------------------------------------------------------------------------------------------

    def on_metadata_update(self, image: MetadataImage, now_ms: int) -> None:
        """Makes and removes partitions to match the image. The first image also settles the folders that exist."""
        old, self._image = self._image, image
        if old is None:
            self._with_folder = self._set_strays_aside(image)
            self._update_topics(image.topics, image, None)
            self._with_folder = set()
        else:
            self._follow(image, old, now_ms)

    def _follow(self, image: MetadataImage, old: MetadataImage, now_ms: int) -> None:
        names = list(image.topics_to_compare(old))
        before = [old.topics[name] for name in names if name in old.topics]
        gone = [topic for topic in before if topic.id not in image.topics_by_id]
        if gone:
            self._delete_topics(gone, now_ms)
        self._resign([topic for topic in before if image.topics.get(topic.name) is not topic], image)
        self._update_topics(names, image, old)

    def _update_topics(self, names: Iterable[str], image: MetadataImage, old: MetadataImage | None) -> None:
        """Updates the topics of these names, or all topics if a dynamic config of the broker changes their defaults."""
        shared, former = TopicConfig.resolve(self.config, {}), self._defaults
        self._defaults = shared.values
        defaults_changed = former != shared.values
        for name in image.topics if defaults_changed else names:
            topic = image.topics.get(name)
            if topic is None or topic.internal:
                continue
            overrides = image.topic_configs(name)
            configs_changed = defaults_changed or old is None or old.topic_configs(name) is not overrides
            if configs_changed or old is None or old.topics.get(name) is not topic:
                config = TopicConfig.resolve(self.config, overrides) if overrides else shared
                self._update_topic(topic, config, configs_changed, old)

    def _update_topic(
        self, topic: TopicImage, config: TopicConfig, configs_changed: bool, old: MetadataImage | None
    ) -> None:
        node_id, partitions = self.config.node_id, self._partitions
        for partition_image in topic.partitions:
            if partition_image.leader != node_id:
                continue
            partition = partitions.get((topic.name, partition_image.partition_id))
            if partition is not None and not configs_changed:
                partition.update(partition_image)
                continue
            if partition is None:
                self._add_partition(topic, partition_image, config, old)
            else:
                partition.configure(config)
                partition.update(partition_image)

    def _is_gained(self, image: PartitionImage, old: MetadataImage | None) -> bool:
        """Returns whether another broker may have led the partition since this broker last knew its log."""
        return image.leader_epoch > 0 and (old is not None or not self._log_dir.had_clean_shutdown)

    def _add_partition(
        self, topic: TopicImage, image: PartitionImage, config: TopicConfig, old: MetadataImage | None
    ) -> None:
        key = (topic.name, image.partition_id)
        if key in self._to_retire:
            self._housekeeping.retire([(*key, *self._to_retire.pop(key))])
        # If the first image could not set a folder aside, because another worker uses it, the opening has to.
        is_new = old is not None or key not in self._with_folder
        partition = Partition(topic, image, config, self._log_dir, self._openings, is_new=is_new)
        self._partitions[key] = partition
        if self._is_gained(image, old):
            self._log_dir.note_gained(topic.name, image.partition_id)
        if old is not None and topic.id not in old.topics_by_id:
            self._log_dir.note_created(topic.name, image.partition_id)
        if key not in self._with_folder:
            self._without_folder.append(partition)

    def settle_folders(self, limit: int) -> bool:
        """Retires some folders of deleted partitions, and makes the folders of up to `limit` new ones.

        Returns whether some are left. The first use of a partition makes its folder earlier.
        """
        self._retire_folders(RETIRED_AT_ONCE)
        for _ in range(min(limit, len(self._without_folder))):
            partition = self._without_folder.popleft()
            try:
                partition.make_folder()
            except PartitionHeldError:
                # Another worker has yet to remove the folder of a deleted topic. Opening the log makes this one.
                pass
            except OSError as error:
                # Opening the log makes the folder again. If that fails too, the request fails.
                _logger.error("Making the folder of %s-%d failed: %s", partition.topic, partition.index, error)
        return bool(self._to_retire or self._without_folder)

    def _retire_folders(self, limit: int) -> None:
        keys = list(islice(self._to_retire, limit))
        self._housekeeping.retire([(*key, *self._to_retire.pop(key)) for key in keys])

    def _resign(self, changed: Iterable[TopicImage], image: MetadataImage) -> None:
        """Closes and hands over the partitions that other brokers lead from now on."""
        lost: list[tuple[str, int]] = []
        for before in changed:
            topic = image.topics.get(before.name)
            if topic is None or topic.internal:
                continue
            for partition_image in topic.partitions:
                key = (topic.name, partition_image.partition_id)
                if key in self._partitions and partition_image.leader != self.config.node_id:
                    self._partitions.pop(key).resign()
                    lost.append(key)
        self.hand_over(lost)

    def hand_over(self, partitions: list[tuple[str, int]]) -> None:
        """Leaves closed logs to the brokers that lead them now. Parked fetches of these partitions are woken."""
        if not partitions:
            return
        try:
            self._log_dir.hand_over(partitions)
        except OSError as error:
            # They stay locked, and no broker serves them. A new leader without the start offsets would serve deleted
            # records again.
            _logger.error("Handing %d partitions over to other brokers failed: %s", len(partitions), error)
        for key in partitions:
            self.fetches.on_change(*key)

    def _delete_topics(self, topics: list[TopicImage], now_ms: int) -> None:
        for topic in topics:
            keys = [(topic.name, image.partition_id) for image in topic.partitions]
            retired = topic.id.hex(), now_ms
            for key in keys:
                partition = self._partitions.pop(key, None)
                if partition is not None:
                    partition.delete()
                    self._to_retire[key] = retired
            for key in self.fetches.watched(keys):
                self.fetches.on_change(*key)

    def _set_strays_aside(self, image: MetadataImage) -> set[tuple[str, int]]:
        """Renames the folders of topics that the metadata does not know; their data stays (as with Kafka's `-stray`).

        Returns the partitions whose folders stay. If other workers use the data folder already, only partitions that
        this worker leads are checked.
        """
        strays: list[tuple[str, int, str]] = []
        staying: set[tuple[str, int]] = set()
        for topic, index in self._log_dir.partitions():
            partition_image = image.partition(topic, index)
            if not self._settles_folder and (partition_image is None or partition_image.leader != self.config.node_id):
                continue
            if topic.startswith("__") and (partition_image is not None or topic == CLUSTER_METADATA_TOPIC):
                continue
            topic_id = self._log_dir.topic_id(topic, index)
            if partition_image is not None and topic_id in (None, image.topics[topic].id):
                staying.add((topic, index))
                continue
            _logger.warning("The folder of %s-%d belongs to no topic: renaming it to *%s", topic, index, STRAY_SUFFIX)
            strays.append((topic, index, (topic_id or ZERO_UUID).hex()))
        if strays:
            self._log_dir.delete_partitions(strays, STRAY_SUFFIX)
        return staying

    # --- lookups ------------------------------------------------------------------------------------------------------

    def topic_name(self, topic_id: bytes) -> str | None:
        topic = self._image.topics_by_id.get(topic_id) if self._image is not None else None
        return topic.name if topic is not None else None

    def topic_id(self, topic: str) -> bytes | None:
        topic_image = self._image.topics.get(topic) if self._image is not None else None
        return topic_image.id if topic_image is not None else None

    def has_partition(self, topic: str, partition: int) -> bool:
        """Returns whether the partition exists, on any broker."""
        if (topic, partition) in self._partitions:
            return True
        return self._image is not None and self._image.partition(topic, partition) is not None

    def leader_of(self, topic: str, partition: int) -> tuple[int, int]:
        """Returns (leader, leader epoch), (-1, -1) if the partition does not exist."""
        image = self._image.partition(topic, partition) if self._image is not None else None
        return (image.leader, image.leader_epoch) if image is not None else (-1, -1)

    def partition(self, topic: str, partition: int) -> Partition:
        """Returns the partition; raises KafkaError if it does not exist or another broker leads it."""
        served = self._partitions.get((topic, partition))
        if served is None:
            leader, _ = self.leader_of(topic, partition)
            if self.has_partition(topic, partition):
                raise KafkaError(Errors.NOT_LEADER_OR_FOLLOWER, f"{topic}-{partition} is led by broker {leader}.")
            raise KafkaError(Errors.UNKNOWN_TOPIC_OR_PARTITION, f"The partition {topic}-{partition} does not exist.")
        return served

    def _internal(self, topic: str, partition: int) -> PartitionImage | None:
        """Returns the image of a partition of an internal topic, None for any other partition."""
        if not topic.startswith("__") or self._image is None:
            return None
        topic_image = self._image.topics.get(topic)
        if topic_image is None or not topic_image.internal:
            return None
        return self._image.partition(topic, partition)

    # --- requests -----------------------------------------------------------------------------------------------------

    def append(
        self,
        topic: str,
        partition: int,
        batch: Buffer,
        *,
        requires_all: bool,
        now_ms: int,
        verified: Verified | None = None,
    ) -> AppendResult:
        """Appends a client's batch to a partition's log. The batch is then in the page cache."""
        served = self._partitions.get((topic, partition))
        if served is None:
            if self._internal(topic, partition) is not None:
                # A coordinator owns the log. Not even Kafka's own admin client may write there.
                raise KafkaError(Errors.INVALID_TOPIC_EXCEPTION, f"Clients must not append to the topic {topic}.")
            served = self.partition(topic, partition)
        result = served.append(
            batch,
            requires_all=requires_all,
            verified=verified,
            needs_verification=self.config.transaction_partition_verification_enable,
            now_ms=now_ms,
        )
        if result.added_bytes:
            self.fetches.on_append(topic, partition, result.added_bytes)
        return result

    def opening(self, topic: str, partition: int, now_ms: int) -> Opening[OpenLog] | None:
        """Begins to open a log if it is not open. Returns the opening if another thread does it, else None."""
        served = self._partitions.get((topic, partition))
        return None if served is None or served.opened is not None else served.opening(now_ms)

    def is_in_transaction(self, topic: str, partition: int, producer: Producer, now_ms: int) -> bool:
        """Returns whether the producer has an open transaction in a partition. Also True if it does not exist here."""
        served = self._partitions.get((topic, partition))
        return served is None or served.is_in_transaction(producer, now_ms)

    def start_verification(self, topic: str, partition: int, producer: Producer, now_ms: int) -> int | None:
        """Returns a ticket if a write needs the consent of the transaction coordinator first, else None.

        Raises KafkaError if the log is not usable now.
        """
        served = self._partitions.get((topic, partition))
        return None if served is None else served.start_verification(producer, now_ms)

    def finish_verification(self, topic: str, partition: int, producer: Producer, ticket: int) -> None:
        served = self._partitions.get((topic, partition))
        if served is not None:
            served.finish_verification(producer, ticket)

    def write_marker(self, topic: str, partition: int, marker: Marker, now_ms: int) -> None:
        """Ends a transaction in one partition. Parked read_committed fetches are woken, since they may return more."""
        if self.partition(topic, partition).write_marker(marker, now_ms):
            self.fetches.on_change(topic, partition)

    def unchanged_transactions(self) -> list[tuple[str, int, ProducerEntry]]:
        """Returns topic, partition and producer of the transactions that were open when their logs were opened.

        Leaves out those that have ended or got a batch since then.
        """
        unchanged = []
        for topic, partition in list(self._openings.with_transactions):
            served = self._partitions.get((topic, partition))
            opened = served.opened if served is not None else None
            entries = opened.unchanged_transactions() if opened is not None else []
            if not entries:
                del self._openings.with_transactions[topic, partition]
            unchanged += [(topic, partition, entry) for entry in entries]
        return unchanged

    def active_producers(self, topic: str, partition: int, now_ms: int) -> list[ProducerEntry]:
        """Returns the answer of DescribeProducers for one partition."""
        image = self._internal(topic, partition)
        if image is None:
            return self.partition(topic, partition).active_producers(now_ms)
        log = self._internal_log(topic, image, UNDEFINED_EPOCH)
        return list(self._internal_producers.of(topic, partition, log, now_ms).entries.values())

    @property
    def file_system(self) -> FileSystem:
        return self._fs

    def folder_of(self, topic: str, partition: int) -> str:
        return self._log_dir.partition_path(topic, partition)

    def open_log_size(self, topic: str, partition: int) -> int | None:
        """Returns the bytes of a log, also of a coordinator's, None if the log is not open."""
        served = self._partitions.get((topic, partition))
        opened = served.opened if served is not None else None
        log = opened.log if opened is not None else self.internal_log(topic, partition)
        return log.size_bytes if log is not None else None

    def log_start_offset(self, topic: str, partition: int) -> int:
        """Returns the start offset of a log, -1 if the log is not open."""
        served = self._partitions.get((topic, partition))
        opened = served.opened if served is not None else None
        return opened.log.start_offset if opened is not None else -1

    def read(
        self, request: FetchPartition, *, max_bytes: int, whole_first_batch: bool, read_committed: bool, now_ms: int
    ) -> ReadResult:
        """Returns the data of one partition for a fetch."""
        image = self._internal(request.topic, request.partition)
        if image is None:
            partition = self.partition(request.topic, request.partition)
            return partition.read(
                request,
                max_bytes=max_bytes,
                whole_first_batch=whole_first_batch,
                read_committed=read_committed,
                now_ms=now_ms,
            )
        log = self._internal_log(request.topic, image, request.current_leader_epoch)
        producers = None
        if read_committed:
            enough = internal_partition.enough_for(
                log, request.fetch_offset, max_bytes, whole_first_batch=whole_first_batch
            )
            producers = self._internal_producers.of(request.topic, request.partition, log, now_ms, enough)
        return internal_partition.read(
            log, producers, request.fetch_offset, max_bytes=max_bytes, whole_first_batch=whole_first_batch
        )

    def find_offset(
        self,
        topic: str,
        partition: int,
        timestamp: int,
        *,
        current_leader_epoch: int,
        read_committed: bool,
        now_ms: int,
    ) -> FoundOffset:
        """Returns the answer of ListOffsets for one partition."""
        image = self._internal(topic, partition)
        if image is None:
            return self.partition(topic, partition).find_offset(
                timestamp, current_leader_epoch=current_leader_epoch, read_committed=read_committed, now_ms=now_ms
            )
        log = self._internal_log(topic, image, current_leader_epoch)
        producers = self._internal_producers.of(topic, partition, log, now_ms) if read_committed else None
        return internal_partition.find_offset_in(log, producers, timestamp, image.leader_epoch)

    def end_offset_for_epoch(
        self, topic: str, partition: int, epoch: int, *, current_leader_epoch: int, now_ms: int
    ) -> tuple[int, int]:
        """Returns the answer of OffsetForLeaderEpoch for one partition: (epoch, end offset)."""
        image = self._internal(topic, partition)
        if image is None:
            return self.partition(topic, partition).end_offset_for_epoch(epoch, current_leader_epoch, now_ms)
        log = self._internal_log(topic, image, current_leader_epoch)
        return internal_partition.epochs_of(log, image.leader_epoch).end_offset_for(
            epoch, log.end_offset if log is not None else 0
        )

    def delete_records(self, topic: str, partition: int, offset: int, now_ms: int) -> int:
        """Moves the start of a partition; returns its low watermark.

        The new start is durable after `note_deleted` and `keep_deleted`.
        """
        if self._internal(topic, partition) is not None:
            raise KafkaError(
                Errors.INVALID_TOPIC_EXCEPTION, f"Records of the internal topic {topic} cannot be deleted."
            )
        return self.partition(topic, partition).delete_records(offset, now_ms)

    def note_deleted(self) -> None:
        """Notes the start offsets that `delete_records` has moved so far, for `keep_deleted`."""
        self._log_dir.note_starts()

    def keep_deleted(self) -> None:
        """Makes the noted start offsets durable: the records before them do not come back after a crash.

        Waits for the disk, and may run in any thread. Raises KAFKA_STORAGE_ERROR if the write fails.
        """
        try:
            self._log_dir.write_starts()
        except OSError as error:
            raise KafkaError(Errors.KAFKA_STORAGE_ERROR, f"Writing the start offsets failed: {error}") from error

    def _internal_log(self, topic: str, image: PartitionImage, current_leader_epoch: int) -> Log | None:
        """Returns the coordinator's log, None if nothing was written to it yet.

        Raises KafkaError while the coordinator has yet to open the log, such as after a start. If the log looked empty
        then, a client that has read it would believe that it was truncated.
        """
        if image.leader != self.config.node_id:
            raise KafkaError(Errors.NOT_LEADER_OR_FOLLOWER)
        if current_leader_epoch not in (UNDEFINED_EPOCH, image.leader_epoch):
            raise KafkaError(
                Errors.FENCED_LEADER_EPOCH if current_leader_epoch < image.leader_epoch else Errors.UNKNOWN_LEADER_EPOCH
            )
        log = self.internal_log(topic, image.partition_id)
        if log is None and self._fs.exists(self.folder_of(topic, image.partition_id)):
            raise KafkaError(Errors.NOT_LEADER_OR_FOLLOWER)
        return log

    # --- the shell's side ---------------------------------------------------------------------------------------------

    def retire_internal(self, topic: str, topic_id: bytes, partitions: list[int], now_ms: int) -> None:
        """Removes the folders of a deleted internal topic, whose coordinator has closed its logs."""
        self._housekeeping.retire([(topic, partition, topic_id.hex(), now_ms) for partition in partitions])

    def compacted(self) -> list[tuple[Partition, OpenLog]]:
        """Returns the open partitions whose cleanup.policy contains `compact`."""
        return [
            (partition, partition.opened)
            for partition in self._partitions.values()
            if partition.opened is not None and partition.config.is_compacted
        ]

    def forget_internal_producers(self, topic: str, partition: int) -> None:
        """Drops the producer state of a coordinator's log, since the cleaner removes markers from it."""
        self._internal_producers.forget(topic, partition)

    def tick(self, now_ms: int) -> None:
        """Does the periodic work that is due, in small steps: retention, flushes, checkpoints, expiration, removals."""
        self._housekeeping.tick(now_ms)

    def close(self, now_ms: int) -> None:
        """Removes deleted files and writes producer snapshots. `LogDir.close` closes the logs afterwards."""
        self._internal_producers.forget_all()
        self._retire_folders(len(self._to_retire))
        # The next start makes the folders that are still missing.
        self._without_folder.clear()
        self._housekeeping.finish(now_ms)
        for partition in self._partitions.values():
            partition.prepare_close()
