# SPDX-License-Identifier: Apache-2.0
"""The class AdminClient."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self, Unpack

from kcoord.client.admin import (
    acls,
    client_quotas,
    configs,
    delegation_tokens,
    features,
    group_offsets,
    groups,
    scram_credentials,
    topics,
)
from kcoord.client.admin.client_quotas import ClientQuotaEntity
from kcoord.client.admin.configs import Config
from kcoord.client.admin.delegation_tokens import DelegationToken
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
from kcoord.client.admin.scram_credentials import (
    ScramCredentialInfo,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from kcoord.client.cluster import Cluster, Deadline
from kcoord.client.config import AdminConfig, AdminOptions, make_config
from kcoord.client.leaders import delete_records, list_offsets
from kcoord.client.offset_messages import GroupOffsets, offsets_to_commit
from kcoord.client.repeat import repeat
from kcoord.client.results import Results
from kcoord.client.tasks import to_the_end
from kcoord.client.types import ListOffsetsResult, OffsetAndMetadata, TopicPartition
from kcoord_protocol.acls import Acl, AclFilter


class AdminClient:
    """Creates, describes, alters and deletes topics, groups and configs.

    Use it with `async with`, or call `start` and `close`. Each call retries retriable errors until `timeout_ms`; None
    stands for `default_api_timeout_ms`.
    """

    def __init__(self, config: AdminConfig | None = None, **options: Unpack[AdminOptions]) -> None:
        self._config = make_config(AdminConfig, config, options)
        self._cluster = Cluster(self._config)

    @property
    def config(self) -> AdminConfig:
        """The settings of this client."""
        return self._config

    async def start(self) -> None:
        """Connects to the cluster and fetches its metadata. Raises TimeoutException if no broker responds."""
        await self._cluster.start(self._deadline(None))

    async def close(self) -> None:
        """Closes all connections. Requests in flight fail."""
        await to_the_end(self._cluster.close())

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
        """Creates topics. With `validate_only` the broker checks the request and creates nothing."""
        deadline = self._deadline(timeout_ms)
        return Results(await topics.create_topics(self._cluster, deadline, new_topics, validate_only))

    async def delete_topics(self, names: Iterable[str], *, timeout_ms: int | None = None) -> Results[str, None]:
        """Deletes topics with their records."""
        return Results(await topics.delete_topics(self._cluster, self._deadline(timeout_ms), names))

    async def create_partitions(
        self,
        new_partitions: Mapping[str, NewPartitions | int],
        *,
        validate_only: bool = False,
        timeout_ms: int | None = None,
    ) -> Results[str, None]:
        """Adds partitions to topics, up to the given total number of partitions."""
        totals = {
            name: NewPartitions(count) if isinstance(count, int) else count for name, count in new_partitions.items()
        }
        deadline = self._deadline(timeout_ms)
        return Results(await topics.create_partitions(self._cluster, deadline, totals, validate_only))

    async def list_topics(self, *, include_internal: bool = False, timeout_ms: int | None = None) -> list[TopicListing]:
        """Returns all topics, sorted by name."""
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
        """Returns each topic's partitions with leader, replicas and creation time (KIP-1327).

        The creation time is None if the broker does not know it. A response has at most `partitions_per_page`
        partitions; the client requests as many pages as needed.
        """
        deadline = self._deadline(timeout_ms)
        return Results(await topics.describe_topics(self._cluster, deadline, names, partitions_per_page))

    async def describe_topic_ids(
        self, topic_ids: Iterable[bytes], *, timeout_ms: int | None = None
    ) -> Results[bytes, TopicDescription]:
        """Returns the description of each topic with one of these ids.

        If no topic has an id, its error is UNKNOWN_TOPIC_ID. If the client may not see the topic, it is
        TOPIC_AUTHORIZATION_FAILED.
        """
        return Results(await topics.describe_topic_ids(self._cluster, self._deadline(timeout_ms), topic_ids))

    async def describe_cluster(
        self, *, include_authorized_operations: bool = False, timeout_ms: int | None = None
    ) -> ClusterDescription:
        """Returns the cluster id, the brokers and the controller."""
        cluster = self._cluster
        return await cluster.retry(
            "describe the cluster",
            self._deadline(timeout_ms),
            lambda: topics.describe_cluster(cluster, include_authorized_operations),
        )

    async def describe_features(self, *, timeout_ms: int | None = None) -> FeatureMetadata:
        """Returns the finalized and the supported levels of the cluster's features (KIP-584)."""
        cluster = self._cluster
        return await cluster.retry(
            "describe features", self._deadline(timeout_ms), lambda: features.describe_features(cluster)
        )

    async def update_features(
        self, updates: Mapping[str, FeatureUpdate], *, validate_only: bool = False, timeout_ms: int | None = None
    ) -> Results[str, None]:
        """Changes the levels of features, all or none of them (KIP-584).

        With `validate_only` the broker checks the request and changes nothing.
        """
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
        """Looks up one offset per partition: the first, the end of the log, or the first at or after a time.

        With `read_committed` the end of the log is the last stable offset.
        """
        deadline = self._deadline(timeout_ms)
        timestamps = {partition: spec.timestamp for partition, spec in specs.items()}
        attempt = list_offsets(self._cluster, deadline, timestamps, read_committed=read_committed)
        return Results(await repeat(self._cluster, deadline, specs, attempt))

    async def delete_records(
        self, before: Mapping[TopicPartition, int], *, timeout_ms: int | None = None
    ) -> Results[TopicPartition, int]:
        """Deletes the records before an offset (-1: all). Returns the new first offset of each partition."""
        deadline = self._deadline(timeout_ms)
        attempt = delete_records(self._cluster, deadline, before)
        return Results(await repeat(self._cluster, deadline, before, attempt))

    # Groups.

    async def list_groups(
        self, *, states: Iterable[str] = (), types: Iterable[str] = (), timeout_ms: int | None = None
    ) -> list[GroupListing]:
        """Returns all groups, sorted by id.

        If `states` or `types` are given, returns only groups in one of these states and of one of these types.
        """
        cluster, state_list, type_list = self._cluster, list(states), list(types)
        return await cluster.retry(
            "list groups", self._deadline(timeout_ms), lambda: groups.list_groups(cluster, state_list, type_list)
        )

    async def list_consumer_groups(
        self, *, states: Iterable[str] = (), types: Iterable[str] = (), timeout_ms: int | None = None
    ) -> list[GroupListing]:
        """Returns the groups of consumers. Omits groups of other clients of the classic protocol, such as Connect."""
        listed = await self.list_groups(states=states, types=types, timeout_ms=timeout_ms)
        return [group for group in listed if group.is_simple or group.protocol_type == groups.CONSUMER_PROTOCOL_TYPE]

    async def describe_consumer_groups(
        self, group_ids: Iterable[str], *, include_authorized_operations: bool = False, timeout_ms: int | None = None
    ) -> Results[str, ConsumerGroupDescription]:
        """Returns each group's state, members, assignments, target assignments and creation time (KIP-1327)."""
        deadline = self._deadline(timeout_ms)
        return Results(await groups.describe_groups(self._cluster, deadline, group_ids, include_authorized_operations))

    async def delete_consumer_groups(
        self, group_ids: Iterable[str], *, timeout_ms: int | None = None
    ) -> Results[str, None]:
        """Deletes empty groups with their offsets (KIP-229)."""
        return Results(await groups.delete_groups(self._cluster, self._deadline(timeout_ms), group_ids))

    async def list_consumer_group_offsets(
        self,
        group_specs: Mapping[str, Iterable[TopicPartition] | None] | Iterable[str],
        *,
        require_stable: bool = False,
        timeout_ms: int | None = None,
    ) -> Results[str, GroupOffsets]:
        """Returns the committed offsets of groups.

        `group_specs` maps group ids to partitions; None stands for all partitions with a committed offset, and so do
        group ids alone. A requested partition without a committed offset has the value None. With `require_stable` the
        call waits until no transaction has pending offsets for the partitions.
        """
        partitions_by_group = group_specs if isinstance(group_specs, Mapping) else dict.fromkeys(group_specs)
        deadline = self._deadline(timeout_ms)
        return Results(
            await group_offsets.list_group_offsets(self._cluster, deadline, partitions_by_group, require_stable)
        )

    async def alter_consumer_group_offsets(
        self,
        group_id: str,
        offsets: Mapping[TopicPartition, OffsetAndMetadata | int],
        *,
        timeout_ms: int | None = None,
    ) -> Results[TopicPartition, None]:
        """Commits offsets for a group without members. If the group has members, the error is UNKNOWN_MEMBER_ID."""
        checked = offsets_to_commit(offsets)
        deadline = self._deadline(timeout_ms)
        return Results(await group_offsets.alter_group_offsets(self._cluster, deadline, group_id, checked))

    async def delete_consumer_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition], *, timeout_ms: int | None = None
    ) -> DeleteConsumerGroupOffsetsResult:
        """Deletes committed offsets of topics that the group is not subscribed to (KIP-496)."""
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
        """Returns the configs of topics, brokers and groups, as one dict by name per resource.

        A mapping limits the result to the named configs of a resource; None stands for all of them.
        """
        keys_by_resource = resources if isinstance(resources, Mapping) else dict.fromkeys(resources)
        deadline = self._deadline(timeout_ms)
        return Results(
            await configs.describe_configs(
                self._cluster, deadline, keys_by_resource, include_synonyms, include_documentation
            )
        )

    async def incremental_alter_configs(
        self,
        changes: Mapping[ConfigResource, Iterable[AlterConfigOp]],
        *,
        validate_only: bool = False,
        timeout_ms: int | None = None,
    ) -> Results[ConfigResource, None]:
        """Changes configs, all or none of the changes to a resource.

        With `validate_only` the broker checks the request and changes nothing.
        """
        deadline = self._deadline(timeout_ms)
        return Results(await configs.incremental_alter_configs(self._cluster, deadline, changes, validate_only))

    async def list_config_resources(
        self, types: Iterable[ConfigResourceType] = (), *, timeout_ms: int | None = None
    ) -> list[ConfigResource]:
        """Returns the resources that have configs of their own, of the given types or of all types."""
        cluster, type_list = self._cluster, list(types)
        return await cluster.retry(
            "list config resources",
            self._deadline(timeout_ms),
            lambda: configs.list_config_resources(cluster, type_list),
        )

    # ACLs.

    async def describe_acls(self, acl_filter: AclFilter | None = None, *, timeout_ms: int | None = None) -> list[Acl]:
        """Returns the ACLs that match the filter, or all ACLs. Raises SECURITY_DISABLED if there is no authorizer."""
        cluster = self._cluster
        return await cluster.retry(
            "describe ACLs",
            self._deadline(timeout_ms),
            lambda: acls.describe_acls(cluster, acl_filter or AclFilter()),
        )

    async def create_acls(self, new_acls: Iterable[Acl], *, timeout_ms: int | None = None) -> Results[Acl, None]:
        """Creates ACLs. An ACL that exists already is no error."""
        return Results(await acls.create_acls(self._cluster, self._deadline(timeout_ms), new_acls))

    async def delete_acls(
        self, filters: Iterable[AclFilter], *, timeout_ms: int | None = None
    ) -> Results[AclFilter, list[Acl]]:
        """Deletes the ACLs that match at least one filter. Returns the deleted ACLs of each filter."""
        return Results(await acls.delete_acls(self._cluster, self._deadline(timeout_ms), filters))

    # Quotas.

    async def describe_client_quotas(
        self, *, timeout_ms: int | None = None
    ) -> dict[ClientQuotaEntity, dict[str, float]]:
        """Returns the quotas of all users and clients (KIP-546), by entity and key."""
        cluster = self._cluster
        return await cluster.retry(
            "describe client quotas",
            self._deadline(timeout_ms),
            lambda: client_quotas.describe_client_quotas(cluster),
        )

    async def alter_client_quotas(
        self,
        alterations: Mapping[ClientQuotaEntity, Mapping[str, float | None]],
        *,
        validate_only: bool = False,
        timeout_ms: int | None = None,
    ) -> Results[ClientQuotaEntity, None]:
        """Sets quotas by entity and key, and removes those whose value is None."""
        deadline = self._deadline(timeout_ms)
        return Results(
            await client_quotas.alter_client_quotas(self._cluster, deadline, alterations, validate_only=validate_only)
        )

    # Users.

    async def describe_user_scram_credentials(
        self, users: Iterable[str] = (), *, timeout_ms: int | None = None
    ) -> Results[str, list[ScramCredentialInfo]]:
        """Returns the mechanisms and iterations of users' SCRAM credentials (KIP-554), of all users if none is given.

        A user without credentials has the error RESOURCE_NOT_FOUND.
        """
        cluster, user_list = self._cluster, list(users)
        return Results(
            await cluster.retry(
                "describe SCRAM credentials",
                self._deadline(timeout_ms),
                lambda: scram_credentials.describe_user_scram_credentials(cluster, user_list),
            )
        )

    async def alter_user_scram_credentials(
        self,
        alterations: Iterable[UserScramCredentialUpsertion | UserScramCredentialDeletion],
        *,
        timeout_ms: int | None = None,
    ) -> Results[str, None]:
        """Creates, replaces and deletes SCRAM credentials (KIP-554). Brokers accept one alteration for each user."""
        deadline = self._deadline(timeout_ms)
        return Results(await scram_credentials.alter_user_scram_credentials(self._cluster, deadline, alterations))

    # Delegation tokens. Periods are in milliseconds from now, principals are `Type:name`.

    async def create_delegation_token(
        self,
        *,
        owner: str | None = None,
        renewers: Iterable[str] = (),
        max_life_time_ms: int = -1,
        timeout_ms: int | None = None,
    ) -> DelegationToken:
        """Creates a delegation token (KIP-48) of `owner`, or of this client. -1 is the longest life of the broker.

        If a response is lost, the client asks again, and there may be a token that nobody got.
        """
        cluster, renewer_list = self._cluster, list(renewers)
        return await cluster.retry(
            "create a delegation token",
            self._deadline(timeout_ms),
            lambda: delegation_tokens.create_delegation_token(cluster, owner, renewer_list, max_life_time_ms),
        )

    async def renew_delegation_token(
        self, hmac: bytes, *, renew_time_period_ms: int = -1, timeout_ms: int | None = None
    ) -> int:
        """Lets a token expire after a period, -1 for the broker's default. Returns the new expiry time."""
        cluster = self._cluster
        return await cluster.retry(
            "renew a delegation token",
            self._deadline(timeout_ms),
            lambda: delegation_tokens.renew_delegation_token(cluster, hmac, renew_time_period_ms),
        )

    async def expire_delegation_token(
        self, hmac: bytes, *, expiry_time_period_ms: int = -1, timeout_ms: int | None = None
    ) -> int:
        """Lets a token expire after a period; a negative period removes it at once. Returns the new expiry time."""
        cluster = self._cluster
        return await cluster.retry(
            "expire a delegation token",
            self._deadline(timeout_ms),
            lambda: delegation_tokens.expire_delegation_token(cluster, hmac, expiry_time_period_ms),
        )

    async def describe_delegation_tokens(
        self, owners: Iterable[str] | None = None, *, timeout_ms: int | None = None
    ) -> list[DelegationToken]:
        """Returns the tokens that one of `owners` owns or may renew. None stands for all that this client may see."""
        cluster, owner_list = self._cluster, None if owners is None else list(owners)
        return await cluster.retry(
            "describe delegation tokens",
            self._deadline(timeout_ms),
            lambda: delegation_tokens.describe_delegation_tokens(cluster, owner_list),
        )
