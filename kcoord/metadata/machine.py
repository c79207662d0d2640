# SPDX-License-Identifier: Apache-2.0
"""MetadataMachine: the state machine of the metadata log.

The runtime runs it like the shard of a coordinator, in the event loop of the process that writes the metadata log:

1. A request handler submits an operation (`create_topics`, `fence_broker`, ...). It reads the image and returns records
   and a response, and changes nothing.
2. The runtime calls `replay` with each record. The next access to `image` returns an image with these records, so the
   next operation sees them. Operations therefore take effect one after another.
3. The runtime appends the records to the log. When they are durable, the owner of the machine publishes the image, and
   then the runtime delivers the response.

The image is thus ahead of the disk. A crash loses records that were not durable, but no client has seen their
response or their image. After a start, `replay` of the log rebuilds the image, and `register_brokers` then
updates brokers, leaders and in-sync replicas.

If delegation tokens are enabled, a timer removes the expired ones. The machine has no background tasks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kcoord.config import BrokerConfig
from kcoord.metadata import bootstrap, configs, features, fencing, reassignment, records, scram, topics
from kcoord.metadata.image import BrokerImage, ImageBuilder, MetadataImage
from kcoord.metadata.placement import move_records
from kcoord.metadata.records import BrokerRegistration
from kcoord.runtime.result import (
    CoordinatorRecord,
    CoordinatorResult,
    OperationContext,
    Schedule,
    Task,
    TimerEffect,
    TimerKey,
    TimerKind,
)

if TYPE_CHECKING:
    from kcoord_protocol.messages import (
        AlterClientQuotasRequest,
        AlterClientQuotasResponse,
        AlterConfigsRequest,
        AlterConfigsResponse,
        AlterPartitionReassignmentsRequest,
        AlterPartitionReassignmentsResponse,
        AlterUserScramCredentialsRequest,
        AlterUserScramCredentialsResponse,
        CreateAclsRequest,
        CreateAclsResponse,
        CreateDelegationTokenRequest,
        CreateDelegationTokenResponse,
        CreatePartitionsRequest,
        CreatePartitionsResponse,
        CreateTopicsRequest,
        CreateTopicsResponse,
        DeleteAclsRequest,
        DeleteAclsResponse,
        DeleteTopicsRequest,
        DeleteTopicsResponse,
        ElectLeadersRequest,
        ElectLeadersResponse,
        ExpireDelegationTokenRequest,
        ExpireDelegationTokenResponse,
        IncrementalAlterConfigsRequest,
        IncrementalAlterConfigsResponse,
        RenewDelegationTokenRequest,
        RenewDelegationTokenResponse,
        UpdateFeaturesRequest,
        UpdateFeaturesResponse,
    )

PRODUCER_ID_BLOCK_SIZE: Final = 1000


class MetadataTimer(TimerKind):
    """The timers of the metadata machine."""

    TOKEN_EXPIRY = "token-expiry"


TOKEN_EXPIRY: Final = TimerKey(MetadataTimer.TOKEN_EXPIRY)


@dataclass(slots=True)
class ProducerIdBlock:
    """A block of producer ids that one broker may give out."""

    first_id: int
    size: int


class MetadataMachine:
    """The state machine of the metadata log. `config` is the configuration in effect, which dynamic configs change."""

    def __init__(self, config: BrokerConfig, image: MetadataImage | None = None) -> None:
        self._config = config
        self._image = image if image is not None else MetadataImage.empty()
        self._builder: ImageBuilder | None = None

    @property
    def image(self) -> MetadataImage:
        """The image of all records replayed so far."""
        if self._builder is not None:
            self._image = self._builder.build()
            self._builder = None
        return self._image

    def replay(self, record: CoordinatorRecord) -> None:
        if self._builder is None:
            self._builder = ImageBuilder(self._image)
        self._builder.replay(record)

    def copy(self) -> MetadataMachine:
        """Returns a machine with the same image, on which another thread may run operations."""
        return MetadataMachine(self._config, self.image)

    def adopt(self, builder: ImageBuilder) -> None:
        """Changes the image as replaying the records does that were replayed in `builder`, which began with it."""
        self._builder = builder

    def on_loaded(self, context: OperationContext) -> CoordinatorResult[None]:
        return CoordinatorResult(None, timers=self._expiry_timers(context.now_ms))

    def fire_timer(self, context: OperationContext, key: TimerKey) -> CoordinatorResult[None]:
        """Removes expired delegation tokens. If there may be more of them, the next operation follows at once."""
        assert key == TOKEN_EXPIRY, f"the metadata machine does not set this timer: {key}"
        from kcoord.metadata import delegation_tokens

        expired = delegation_tokens.expired_token_records(self.image, context.now_ms)
        if len(expired) == delegation_tokens.MAX_REMOVALS:
            return CoordinatorResult(None, expired, [Schedule(TOKEN_EXPIRY, context.now_ms)])
        return CoordinatorResult(None, expired, self._expiry_timers(context.now_ms))

    def _expiry_timers(self, now_ms: int) -> list[TimerEffect]:
        config = self._config
        if not config.delegation_token_secret_key:
            return []
        return [Schedule(TOKEN_EXPIRY, now_ms + config.delegation_token_expiry_check_interval_ms)]

    def complete_task(self, context: OperationContext, task: Task, value: object) -> CoordinatorResult[None]:
        raise AssertionError(f"the metadata machine starts no tasks: {task}")

    def register_brokers(
        self,
        context: OperationContext,
        registrations: Sequence[BrokerRegistration],
        credentials: Sequence[CoordinatorRecord] = (),
    ) -> CoordinatorResult[None]:
        """Registers all brokers of the cluster at its start. A new cluster gets its feature levels and `credentials`.

        Brokers that are not among `registrations` are unregistered. If the set of brokers has changed, or a partition
        has an unknown leader, all partitions are spread over the brokers again.
        """
        image = self.image
        new_records = [] if image.features else [*bootstrap.feature_records(self._config), *credentials]
        new_records += self._registration_records(registrations)
        present = {registration.broker_id for registration in registrations}
        new_records += [
            records.new_unregister_broker_record(broker_id, broker.broker_epoch)
            for broker_id, broker in image.brokers.items()
            if broker_id not in present
        ]
        leaders = {partition.leader for topic in image.topics.values() for partition in topic.partitions}
        if image.brokers.keys() != present or not leaders <= present | {records.NO_LEADER}:
            new_records += move_records(self._image_with(new_records), self._config.node_id)
        else:
            new_records += fencing.settle_records(self._image_with(new_records))
        return CoordinatorResult(None, new_records)

    def _registration_records(self, registrations: Sequence[BrokerRegistration]) -> list[CoordinatorRecord]:
        image = self.image
        new_records = []
        for registration in registrations:
            registered = image.brokers.get(registration.broker_id)
            if registered is None or _has_changed(registered, registration):
                epoch = 0 if registered is None else registered.broker_epoch + 1
                new_records.append(records.new_register_broker_record(registration, epoch))
        return new_records

    def _image_with(self, new_records: Sequence[CoordinatorRecord]) -> MetadataImage:
        builder = ImageBuilder(self.image)
        for record in new_records:
            builder.replay(record)
        return builder.build()

    def create_topics(
        self, context: OperationContext, request: CreateTopicsRequest, topic_ids: Sequence[bytes]
    ) -> CoordinatorResult[CreateTopicsResponse]:
        """Creates topics. `topic_ids` are new random ids, at least one per topic of the request."""
        return topics.TopicOperations(self.image, self._config, context).create_topics(request, topic_ids)

    def create_partitions(
        self, context: OperationContext, request: CreatePartitionsRequest
    ) -> CoordinatorResult[CreatePartitionsResponse]:
        return topics.TopicOperations(self.image, self._config, context).create_partitions(request)

    def delete_topics(
        self, context: OperationContext, request: DeleteTopicsRequest
    ) -> CoordinatorResult[DeleteTopicsResponse]:
        return topics.delete_topics(self.image, self._config, context, request)

    def alter_partition_reassignments(
        self, context: OperationContext, request: AlterPartitionReassignmentsRequest
    ) -> CoordinatorResult[AlterPartitionReassignmentsResponse]:
        return reassignment.alter_partition_reassignments(self.image, self._config, request)

    def elect_leaders(
        self, context: OperationContext, request: ElectLeadersRequest
    ) -> CoordinatorResult[ElectLeadersResponse]:
        return reassignment.elect_leaders(self.image, context, request)

    def fence_broker(self, context: OperationContext, broker_id: int, fenced: bool) -> CoordinatorResult[bool]:
        """Fences or unfences a broker. The response says whether it is fenced afterwards."""
        return fencing.fence_broker(self.image, broker_id, fenced=fenced)

    def unregister_broker(self, context: OperationContext, broker_id: int) -> CoordinatorResult[None]:
        return fencing.unregister_broker(self.image, broker_id)

    def update_features(
        self, context: OperationContext, request: UpdateFeaturesRequest
    ) -> CoordinatorResult[UpdateFeaturesResponse]:
        return features.update_features(self.image, self._config, context, request)

    def alter_user_scram_credentials(
        self, context: OperationContext, request: AlterUserScramCredentialsRequest
    ) -> CoordinatorResult[AlterUserScramCredentialsResponse]:
        return scram.alter_user_scram_credentials(self.image, request)

    def incremental_alter_configs(
        self, context: OperationContext, request: IncrementalAlterConfigsRequest
    ) -> CoordinatorResult[IncrementalAlterConfigsResponse]:
        return configs.incremental_alter_configs(self.image, self._config, request)

    def alter_configs(
        self, context: OperationContext, request: AlterConfigsRequest
    ) -> CoordinatorResult[AlterConfigsResponse]:
        return configs.alter_configs(self.image, self._config, request)

    def create_acls(
        self, context: OperationContext, request: CreateAclsRequest, acl_ids: Sequence[bytes]
    ) -> CoordinatorResult[CreateAclsResponse]:
        """Creates ACLs. `acl_ids` are new random ids, at least one per ACL of the request."""
        # Most brokers have no ACLs, so their start does not import this module.
        from kcoord.metadata import acl_changes

        return acl_changes.create_acls(self.image, self._config, request, acl_ids)

    def delete_acls(
        self, context: OperationContext, request: DeleteAclsRequest
    ) -> CoordinatorResult[DeleteAclsResponse]:
        from kcoord.metadata import acl_changes

        return acl_changes.delete_acls(self.image, request)

    def create_delegation_token(
        self, context: OperationContext, request: CreateDelegationTokenRequest, token_id: str
    ) -> CoordinatorResult[CreateDelegationTokenResponse]:
        """Creates a delegation token of the client in `context`. `token_id` is a new random id."""
        # Most clusters have no delegation tokens.
        from kcoord.metadata import delegation_tokens

        return delegation_tokens.create_delegation_token(self.image, self._config, context, request, token_id)

    def renew_delegation_token(
        self, context: OperationContext, request: RenewDelegationTokenRequest
    ) -> CoordinatorResult[RenewDelegationTokenResponse]:
        from kcoord.metadata import delegation_tokens

        return delegation_tokens.renew_delegation_token(self.image, self._config, context, request)

    def expire_delegation_token(
        self, context: OperationContext, request: ExpireDelegationTokenRequest
    ) -> CoordinatorResult[ExpireDelegationTokenResponse]:
        from kcoord.metadata import delegation_tokens

        return delegation_tokens.expire_delegation_token(self.image, self._config, context, request)

    def alter_client_quotas(
        self, context: OperationContext, request: AlterClientQuotasRequest
    ) -> CoordinatorResult[AlterClientQuotasResponse]:
        # Most brokers have no quotas either.
        from kcoord.metadata import client_quotas

        return client_quotas.alter_client_quotas(self.image, request)

    def allocate_producer_ids(
        self, context: OperationContext, broker_id: int, size: int = PRODUCER_ID_BLOCK_SIZE
    ) -> CoordinatorResult[ProducerIdBlock]:
        """Allocates a block of producer ids that no broker had before."""
        image = self.image
        broker = image.brokers.get(broker_id)
        epoch = -1 if broker is None else broker.broker_epoch
        first_id = image.next_producer_id
        record = records.new_producer_ids_record(broker_id, epoch, first_id + size)
        return CoordinatorResult(ProducerIdBlock(first_id, size), [record])


def _has_changed(broker: BrokerImage, registration: BrokerRegistration) -> bool:
    return (
        broker.endpoints != registration.endpoints
        or broker.rack != registration.rack
        or broker.log_dirs != registration.log_dirs
        or broker.fenced
    )
