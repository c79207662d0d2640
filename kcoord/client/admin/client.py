# SPDX-License-Identifier: Apache-2.0
"""AdminClient: every call takes a timeout, and repeats what means "elsewhere" or "later" until it is over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

from kcoord.client.admin import configs, features, group_offsets, groups, topics
from kcoord.client.admin.configs import Config
from kcoord.client.admin.group_offsets import DeleteConsumerGroupOffsetsResult
from kcoord.client.admin.model import (
    AlterConfigOp,
    ClusterDescription,
    ConfigResource,
    ConfigResourceType,
    ConsumerGroupDescription,
    CreatedTopic,
    FeatureMetadata,
    FeatureUpdate,
    GroupListing,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    TopicDescription,
    TopicListing,
)
from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.config import AdminConfig, AdminOptions, make_config
from kcoord.client.leaders import delete_records, list_offsets
from kcoord.client.offset_messages import GroupOffsets
from kcoord.client.repeat import repeat
from kcoord.client.results import Results
from kcoord.client.types import ListOffsetsResult, OffsetAndMetadata, TopicPartition


class AdminClient:
    """Looks after topics, groups and configs.

    Use it with `async with`, or call `start` and `close`. A `timeout_ms` of None is `default_api_timeout_ms`.
    """

    def __init__(self, config: AdminConfig | None = None, **options: Unpack[AdminOptions]) -> None:
        self._config = make_config(AdminConfig, config, options)
        self._cluster = Cluster(self._config)

    @property
    def config(self) -> AdminConfig:
        """The settings that it was made with."""
        return self._config

    async def start(self) -> None:
        """Finds the cluster."""
        await self._cluster.start(self._deadline(None))

    async def close(self) -> None:
        await self._cluster.close()

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _deadline(self, timeout_ms: int | None) -> Deadline:
        return self._cluster.deadline(timeout_ms)

    # Topics.

    async def create_topics(
        self, new_topics: Iterable[NewTopic], *, validate_only: bool = False, timeout_ms: int | None = None
    ) -> Results[str, CreatedTopic]:
        """Creates topics, or only checks that it could."""
        deadline = self._deadline(timeout_ms)
        return Results(await topics.create_topics(self._cluster, deadline, new_topics, validate_only))

    async def delete_topics(self, names: Iterable[str], *, timeout_ms: int | None = None) -> Results[str, None]:
        return Results(await topics.delete_topics(self._cluster, self._deadline(timeout_ms), names))

    async def create_partitions(
        self,
        new_partitions: Mapping[str, NewPartitions | int],
        *,
        validate_only: bool = False,
        timeout_ms: int | None = None,
    ) -> Results[str, None]:
        """Grows topics to a total number of partitions."""
        wanted = {
            name: NewPartitions(count) if isinstance(count, int) else count for name, count in new_partitions.items()
        }
        deadline = self._deadline(timeout_ms)
        return Results(await topics.create_partitions(self._cluster, deadline, wanted, validate_only))

    async def list_topics(self, *, include_internal: bool = False, timeout_ms: int | None = None) -> list[TopicListing]:
        """All topics, by name."""
        cluster = self._cluster
        return await cluster.retry(
            "list topics", self._deadline(timeout_ms), lambda: topics.list_topics(cluster, include_internal)
        )

    async def describe_topics(
        self,
        names: Iterable[str],
        *,
        partitions_per_page: int = topics.PARTITIONS_PER_PAGE,
        timeout_ms: int | None = None,
    ) -> Results[str, TopicDescription]:
        """Partitions with leaders, replicas and, where the broker knows them, creation times (KIP-1327). Not more than
        so many are asked for at a time.
        """
        deadline = self._deadline(timeout_ms)
        return Results(await topics.describe_topics(self._cluster, deadline, names, partitions_per_page))

    async def describe_cluster(
        self, *, include_authorized_operations: bool = False, timeout_ms: int | None = None
    ) -> ClusterDescription:
        cluster = self._cluster
        return await cluster.retry(
            "describe the cluster",
            self._deadline(timeout_ms),
            lambda: topics.describe_cluster(cluster, include_authorized_operations),
        )

    async def describe_features(self, *, timeout_ms: int | None = None) -> FeatureMetadata:
        """Features with their levels (KIP-584)."""
        cluster = self._cluster
        return await cluster.retry(
            "describe features", self._deadline(timeout_ms), lambda: features.describe_features(cluster)
        )

    async def update_features(
        self, updates: Mapping[str, FeatureUpdate], *, validate_only: bool = False, timeout_ms: int | None = None
    ) -> Results[str, None]:
        """Changes the levels of features, all or none (KIP-584), or only checks that it could."""
        deadline = self._deadline(timeout_ms)
        return Results(await features.update_features(self._cluster, deadline, updates, validate_only))

    # Offsets and records of partitions.

    async def list_offsets(
        self,
        specs: Mapping[TopicPartition, OffsetSpec],
        *,
        read_committed: bool = False,
        timeout_ms: int | None = None,
    ) -> Results[TopicPartition, ListOffsetsResult]:
        """The first, the last, or the offset at a time, of each partition."""
        deadline = self._deadline(timeout_ms)
        timestamps = {partition: spec.timestamp for partition, spec in specs.items()}
        attempt = list_offsets(self._cluster, deadline, timestamps, read_committed=read_committed)
        return Results(await repeat(self._cluster, deadline, specs, attempt))

    async def delete_records(
        self, before: Mapping[TopicPartition, int], *, timeout_ms: int | None = None
    ) -> Results[TopicPartition, int]:
        """Deletes the records before an offset (-1: all); returns the partitions' new first offsets."""
        deadline = self._deadline(timeout_ms)
        attempt = delete_records(self._cluster, deadline, before)
        return Results(await repeat(self._cluster, deadline, before, attempt))

    # Groups.

    async def list_groups(
        self, *, states: Iterable[str] = (), types: Iterable[str] = (), timeout_ms: int | None = None
    ) -> list[GroupListing]:
        """All groups, by id; only those in one of the states and of one of the types, where some are given."""
        cluster, state_list, type_list = self._cluster, list(states), list(types)
        return await cluster.retry(
            "list groups", self._deadline(timeout_ms), lambda: groups.list_groups(cluster, state_list, type_list)
        )

    async def list_consumer_groups(
        self, *, states: Iterable[str] = (), types: Iterable[str] = (), timeout_ms: int | None = None
    ) -> list[GroupListing]:
        """The groups of consumers: those of other clients of the classic protocol, such as Connect, are left out."""
        listed = await self.list_groups(states=states, types=types, timeout_ms=timeout_ms)
        return [group for group in listed if group.is_simple or group.protocol_type == groups.CONSUMER_PROTOCOL_TYPE]

    async def describe_consumer_groups(
        self, group_ids: Iterable[str], *, include_authorized_operations: bool = False, timeout_ms: int | None = None
    ) -> Results[str, ConsumerGroupDescription]:
        """State, members, assignments, target assignments, and the group's creation time (KIP-1327)."""
        deadline = self._deadline(timeout_ms)
        return Results(await groups.describe_groups(self._cluster, deadline, group_ids, include_authorized_operations))

    async def delete_consumer_groups(
        self, group_ids: Iterable[str], *, timeout_ms: int | None = None
    ) -> Results[str, None]:
        """Deletes empty groups with their offsets (KIP-229)."""
        return Results(await groups.delete_groups(self._cluster, self._deadline(timeout_ms), group_ids))

    async def list_consumer_group_offsets(
        self,
        wanted: Mapping[str, Iterable[TopicPartition] | None] | Iterable[str],
        *,
        require_stable: bool = False,
        timeout_ms: int | None = None,
    ) -> Results[str, GroupOffsets]:
        """The committed offsets of groups: all, or those of some partitions (None for one without)."""
        which = wanted if isinstance(wanted, Mapping) else dict.fromkeys(wanted)
        deadline = self._deadline(timeout_ms)
        return Results(await group_offsets.list_group_offsets(self._cluster, deadline, which, require_stable))

    async def alter_consumer_group_offsets(
        self,
        group_id: str,
        offsets: Mapping[TopicPartition, OffsetAndMetadata | int],
        *,
        timeout_ms: int | None = None,
    ) -> Results[TopicPartition, None]:
        """Commits offsets for a group without members; UNKNOWN_MEMBER_ID says that it has some."""
        wanted = {
            partition: OffsetAndMetadata(offset) if isinstance(offset, int) else offset
            for partition, offset in offsets.items()
        }
        deadline = self._deadline(timeout_ms)
        return Results(await group_offsets.alter_group_offsets(self._cluster, deadline, group_id, wanted))

    async def delete_consumer_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition], *, timeout_ms: int | None = None
    ) -> DeleteConsumerGroupOffsetsResult:
        """Deletes committed offsets of topics that the group does not read (KIP-496)."""
        return await group_offsets.delete_group_offsets(self._cluster, self._deadline(timeout_ms), group_id, partitions)

    # Configs.

    async def describe_configs(
        self,
        resources: Iterable[ConfigResource] | Mapping[ConfigResource, Sequence[str] | None],
        *,
        include_synonyms: bool = False,
        include_documentation: bool = False,
        timeout_ms: int | None = None,
    ) -> Results[ConfigResource, Config]:
        """All settings of topics, brokers and groups, or those named; by name."""
        wanted = resources if isinstance(resources, Mapping) else dict.fromkeys(resources)
        deadline = self._deadline(timeout_ms)
        return Results(
            await configs.describe_configs(self._cluster, deadline, wanted, include_synonyms, include_documentation)
        )

    async def incremental_alter_configs(
        self,
        changes: Mapping[ConfigResource, Iterable[AlterConfigOp]],
        *,
        validate_only: bool = False,
        timeout_ms: int | None = None,
    ) -> Results[ConfigResource, None]:
        """Changes settings, all or none of each resource."""
        deadline = self._deadline(timeout_ms)
        return Results(await configs.incremental_alter_configs(self._cluster, deadline, changes, validate_only))

    async def list_config_resources(
        self, types: Iterable[ConfigResourceType] = (), *, timeout_ms: int | None = None
    ) -> list[ConfigResource]:
        """What has configs of its own, of the given types or of all."""
        cluster, wanted = self._cluster, list(types)
        return await cluster.retry(
            "list config resources",
            self._deadline(timeout_ms),
            lambda: configs.list_config_resources(cluster, wanted),
        )
