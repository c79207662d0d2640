# SPDX-License-Identifier: Apache-2.0
"""Metadata: the brokers, and topics by name (any version), by id (v12 and later) or all topics.

A request may create unknown topics. The response then has the new topic, since no leader election has to be waited for.
v14 adds the creation times of partitions (KIP-1327).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from kcoord.metadata.image import MetadataImage, PartitionImage, TopicImage
from kcoord.metadata.names import topic_name_problem
from kcoord.metadata.records import NO_LEADER
from kcoord.server.api.api_table import RequestContext
from kcoord.server.api.authorization import Rights
from kcoord.server.api.authorized_operations import NOT_ASKED, operations_on, operations_on_cluster
from kcoord.server.api.auto_create import auto_create
from kcoord.server.api.leader_hint import broker_addresses
from kcoord.server.broker import LARGE_RESPONSE_ITEMS, Broker
from kcoord.server.replies import Reply, chain_reply
from kcoord_protocol.acls import AclOperation, ResourceType
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.internal_topics import CLUSTER_METADATA_TOPIC, INTERNAL_TOPICS
from kcoord_protocol.messages import MetadataRequest, MetadataResponse
from kcoord_protocol.uuid import ZERO_UUID

API_KEY = ApiKey.METADATA
VERSIONS = range(0, 15)

LAST_VERSION_WHERE_EMPTY_MEANS_ALL = 0
FIRST_VERSION_WITH_TOPIC_IDS = 12

Topic = MetadataResponse.MetadataResponseTopic
Partition = MetadataResponse.MetadataResponsePartition


def handle(broker: Broker, context: RequestContext, request: MetadataRequest) -> Reply[MetadataResponse]:
    _check_ids(request, context.api_version)
    hidden: frozenset[str] = frozenset()
    refused: dict[str, int] = {}
    missing = _names_to_create(broker, context, request)
    if context.rights is not None:
        hidden = _hidden_names(broker.image, context.rights, request, context.api_version)
        missing, refused = _creatable(context.rights, [name for name in missing if name not in hidden])
    if not missing:
        return _respond(broker, context, request, refused, hidden)
    return chain_reply(
        auto_create(broker, context, missing),
        lambda failures: _respond(broker, context, request, {**failures, **refused}, hidden),
    )


def _hidden_names(image: MetadataImage, rights: Rights, request: MetadataRequest, version: int) -> frozenset[str]:
    """Returns those of the requested names that the client may not describe, whether such topics exist or not."""
    asks_for_all = _asks_for_all(request, version)
    if asks_for_all:
        names = list(image.topics)
    elif _asks_by_id(request):
        ids = {topic.topic_id for topic in request.topics or ()}
        names = [topic.name for topic_id in ids if (topic := image.topics_by_id.get(topic_id)) is not None]
    else:
        names = _names(request)
    allowed = rights.allowed(AclOperation.DESCRIBE, ResourceType.TOPIC, names, logs_denial=not asks_for_all)
    return frozenset(names) - allowed


def _creatable(rights: Rights, names: list[str]) -> tuple[list[str], dict[str, int]]:
    """Returns the names that the client may create topics with, and the errors of the others."""
    if not names or rights.allows_cluster(AclOperation.CREATE, logs_denial=False):
        return names, {}
    allowed = rights.allowed(AclOperation.CREATE, ResourceType.TOPIC, names)
    refused = {name: int(Errors.TOPIC_AUTHORIZATION_FAILED) for name in names if name not in allowed}
    return [name for name in names if name in allowed], refused


def _check_ids(request: MetadataRequest, version: int) -> None:
    """Raises INVALID_REQUEST if the names and ids of topics are not valid.

    v10 and v11 have the field for the id, but KIP-516 allows its use only from v12 on.
    """
    topics = request.topics or ()
    if version < FIRST_VERSION_WITH_TOPIC_IDS:
        if any(topic.name is None or topic.topic_id != ZERO_UUID for topic in topics):
            raise KafkaError(Errors.INVALID_REQUEST, "Topics can be asked for by id from version 12 on.")
    elif any(topic.name is None and topic.topic_id == ZERO_UUID for topic in topics) and not _asks_by_id(request):
        raise KafkaError(Errors.INVALID_REQUEST, "Neither a topic name nor a topic id is given.")


def _asks_by_id(request: MetadataRequest) -> bool:
    """Returns whether the request has at least one id. Names are ignored then."""
    return any(topic.topic_id != ZERO_UUID for topic in request.topics or ())


def _asks_for_all(request: MetadataRequest, version: int) -> bool:
    return request.topics is None or (not request.topics and version <= LAST_VERSION_WHERE_EMPTY_MEANS_ALL)


def _names(request: MetadataRequest) -> list[str]:
    return list(dict.fromkeys(topic.name for topic in request.topics or () if topic.name is not None))


def _names_to_create(broker: Broker, context: RequestContext, request: MetadataRequest) -> list[str]:
    if not request.topics or not request.allow_auto_topic_creation or not broker.config.auto_create_topics_enable:
        return []
    if _asks_by_id(request):
        return []
    topics = broker.image.topics
    return [
        name
        for name in _names(request)
        if name not in topics and name != CLUSTER_METADATA_TOPIC and topic_name_problem(name) is None
    ]


def _respond(
    broker: Broker,
    context: RequestContext,
    request: MetadataRequest,
    failures: Mapping[str, int],
    hidden: Collection[str],
) -> Reply[MetadataResponse]:
    image, version = broker.image, context.api_version
    response = MetadataResponse(
        brokers=[
            MetadataResponse.MetadataResponseBroker(node_id=node_id, host=host, port=port, rack=rack)
            for node_id, host, port, rack in broker_addresses(broker, context.client.listener_name)
        ],
        cluster_id=broker.cluster_id,
        controller_id=broker.controller_id,
        cluster_authorized_operations=(
            operations_on_cluster(context.rights) if request.include_cluster_authorized_operations else NOT_ASKED
        ),
    )

    def complete() -> MetadataResponse:
        response.topics = _topics(image, request, version, failures, hidden)
        if request.include_topic_authorized_operations:
            for topic in response.topics:
                if topic.name is not None and topic.error_code != Errors.TOPIC_AUTHORIZATION_FAILED:
                    topic.topic_authorized_operations = operations_on(context.rights, ResourceType.TOPIC, topic.name)
        return response

    # The authorizer is not made for threads.
    may_use_thread = context.rights is None or not request.include_topic_authorized_operations
    if may_use_thread and _is_large(image, request, version):
        return broker.large_metadata.respond(
            context, request, image, lambda: broker.spawn(broker.made_in_thread(complete, version))
        )
    return complete()


def _is_large(image: MetadataImage, request: MetadataRequest, version: int) -> bool:
    if _asks_for_all(request, version):
        return image.partition_count > LARGE_RESPONSE_ITEMS
    requested = (
        image.topics_by_id.get(topic.topic_id) if topic.name is None else image.topics.get(topic.name)
        for topic in request.topics or ()
    )
    return sum(len(topic.partitions) for topic in requested if topic is not None) > LARGE_RESPONSE_ITEMS


def _topics(
    image: MetadataImage,
    request: MetadataRequest,
    version: int,
    failures: Mapping[str, int],
    hidden: Collection[str],
) -> list[Topic]:
    if _asks_for_all(request, version):
        return [_topic(image, topic) for topic in image.topics.values() if topic.name not in hidden]
    if _asks_by_id(request):
        return _topics_by_id(image, request, hidden)
    return [
        Topic(error_code=Errors.TOPIC_AUTHORIZATION_FAILED, name=name)
        if name in hidden
        else _topic_by_name(image, name, failures)
        for name in _names(request)
    ]


def _topics_by_id(image: MetadataImage, request: MetadataRequest, hidden: Collection[str]) -> list[Topic]:
    topics = []
    for topic_id in dict.fromkeys(topic.topic_id for topic in request.topics or ()):
        topic = image.topics_by_id.get(topic_id)
        if topic is not None and topic.name in hidden:
            topics.append(Topic(error_code=Errors.TOPIC_AUTHORIZATION_FAILED, name=None, topic_id=topic_id))
        elif topic is not None:
            topics.append(_topic(image, topic))
        elif topic_id != ZERO_UUID:
            topics.append(Topic(error_code=Errors.UNKNOWN_TOPIC_ID, name=None, topic_id=topic_id))
    return topics


def _topic_by_name(image: MetadataImage, name: str, failures: Mapping[str, int]) -> Topic:
    topic = image.topics.get(name)
    if topic is not None:
        return _topic(image, topic)
    error = failures.get(name, Errors.UNKNOWN_TOPIC_OR_PARTITION)
    if topic_name_problem(name) is not None:
        error = Errors.INVALID_TOPIC_EXCEPTION
    return Topic(error_code=error, name=name, is_internal=name in INTERNAL_TOPICS)


def _topic(image: MetadataImage, topic: TopicImage) -> Topic:
    away = image.fenced_brokers()
    return Topic(
        name=topic.name,
        topic_id=topic.id,
        is_internal=topic.internal,
        partitions=[_partition(partition, away) for partition in topic.partitions],
    )


def _partition(partition: PartitionImage, away: Collection[int]) -> Partition:
    return Partition(
        error_code=Errors.LEADER_NOT_AVAILABLE if partition.leader == NO_LEADER else Errors.NONE,
        partition_index=partition.partition_id,
        leader_id=partition.leader,
        leader_epoch=partition.leader_epoch,
        replica_nodes=partition.replicas,
        isr_nodes=partition.isr,
        offline_replicas=[replica for replica in partition.replicas if replica in away] if away else [],
        creation_time_ms=partition.creation_time_ms,
    )


def error_response(request: MetadataRequest, error: KafkaError, version: int) -> MetadataResponse:
    return MetadataResponse(
        topics=[
            Topic(error_code=error.error, name=topic.name or "", topic_id=topic.topic_id)
            for topic in request.topics or ()
        ],
        error_code=error.error,
    )
