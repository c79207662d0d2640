# SPDX-License-Identifier: Apache-2.0
"""Which APIs are answered here, which are passed on to the upstream, and in which versions.

* Answered here: the groups and their import, the login, ApiVersions, and FindCoordinator for groups. On the port of a
  broker of the upstream the requests of groups fail with NOT_COORDINATOR, since kcoord's own port coordinates all
  groups.
* Offsets in transactions (`kcoord.upstream.transactions`): AddOffsetsToTxn is answered on every port, with the help of
  the upstream, and TxnOffsetCommit is a request of groups.
* Passed on: all other APIs that both sides have. Produce is capped at v9 and Fetch at v15, because responses of later
  versions have addresses of brokers (KIP-951), and responses of these two APIs are not decoded.
* Not served: delegation tokens, because a token that a client got would be one of kcoord's own principal.

Features are those of the upstream, with two exceptions. `group.version` is kcoord's. `transaction.version` is at most
1: with 2 a client relies on the group coordinator to add partitions to transactions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from kcoord.config import BrokerConfig, Kip1327Form
from kcoord.metadata.image import BROKER_RESOURCE, GROUP_RESOURCE
from kcoord.metadata.records import supported_features
from kcoord.server.api.api_table import Api, ApiTable, ErrorFunction, HandleFunction, RequestContext, build_api_table
from kcoord.server.api.handlers import api_versions
from kcoord.server.api.served_versions import SERVED_VERSIONS
from kcoord.server.broker import Broker
from kcoord.upstream.cluster import BrokerVersions
from kcoord.upstream.group_imports import GroupImports
from kcoord.upstream.import_groups import import_groups_api
from kcoord.upstream.importing_api import IMPORTING_APIS, ImportingApi
from kcoord.upstream.transactions import ADD_PARTITIONS_VERSION, TXN_OFFSET_COMMIT_VERSIONS, commit_offsets
from kcoord_protocol.api_keys import ApiKey, request_class
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    AlterConfigsRequest,
    ApiVersionsRequest,
    ApiVersionsResponse,
    DescribeConfigsRequest,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    IncrementalAlterConfigsRequest,
    ListConfigResourcesRequest,
    ListGroupsResponse,
    Message,
)

GROUP_APIS: Final = frozenset(
    {
        ApiKey.OFFSET_COMMIT,
        ApiKey.OFFSET_FETCH,
        ApiKey.OFFSET_DELETE,
        ApiKey.JOIN_GROUP,
        ApiKey.SYNC_GROUP,
        ApiKey.HEARTBEAT,
        ApiKey.LEAVE_GROUP,
        ApiKey.DESCRIBE_GROUPS,
        ApiKey.LIST_GROUPS,
        ApiKey.DELETE_GROUPS,
        ApiKey.CONSUMER_GROUP_HEARTBEAT,
        ApiKey.CONSUMER_GROUP_DESCRIBE,
        ApiKey.TXN_OFFSET_COMMIT,
    }
)
LOGIN_APIS: Final = frozenset({ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE, ApiKey.API_VERSIONS})
CHOSEN_APIS: Final = frozenset(
    {
        ApiKey.FIND_COORDINATOR,
        ApiKey.DESCRIBE_CONFIGS,
        ApiKey.ALTER_CONFIGS,
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        ApiKey.LIST_CONFIG_RESOURCES,
    }
)
"""APIs whose requests are answered here or passed on, depending on their content (`is_for_kcoord`)."""
UNSERVED_APIS: Final = frozenset(
    {
        ApiKey.CREATE_DELEGATION_TOKEN,
        ApiKey.RENEW_DELEGATION_TOKEN,
        ApiKey.EXPIRE_DELEGATION_TOKEN,
        ApiKey.DESCRIBE_DELEGATION_TOKEN,
    }
)
FORWARDED_APIS: Final = (
    frozenset(SERVED_VERSIONS) - GROUP_APIS - LOGIN_APIS - UNSERVED_APIS - {ApiKey.ADD_OFFSETS_TO_TXN}
)
CAPS: Final = {
    ApiKey.PRODUCE: 9,
    ApiKey.FETCH: 15,
    ApiKey.METADATA: 13,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: 0,
}
"""The highest version of an API that the upstream gets."""
CREATION_TIME_VERSIONS: Final = {ApiKey.METADATA: 14, ApiKey.DESCRIBE_TOPIC_PARTITIONS: 1}
"""The versions of KIP-1327, which add creation times to the response of the version before."""
TRANSACTION_COORDINATOR: Final = 1
HIGHEST_TRANSACTION_VERSION: Final = 1
_TRANSACTION_VERSION: Final = "transaction.version"
_GROUP_VERSION: Final = "group.version"


def forwarded_versions(versions: BrokerVersions) -> dict[int, range]:
    """Returns the versions of the APIs that are passed on to a broker of the upstream."""
    forwarded: dict[int, range] = {}
    for key in FORWARDED_APIS:
        theirs, ours = versions.ranges.get(key), request_class(key).valid_versions
        if theirs is not None:
            highest = min(theirs.stop, ours.stop, CAPS.get(key, ours.stop) + 1)
            # Brokers list Produce v0 for old versions of librdkafka. Its responses are not decoded here.
            lowest = theirs.start if key is ApiKey.PRODUCE else max(theirs.start, ours.start)
            both = range(lowest, highest)
            if both:
                forwarded[key] = both
    return forwarded


def common_versions(several: Sequence[BrokerVersions]) -> BrokerVersions:
    """Returns the versions that all of these brokers have, with the newest features."""
    if not several:
        return BrokerVersions({})
    keys = set.intersection(*(set(versions.ranges) for versions in several))
    ranges: dict[int, range] = {}
    for key in keys:
        theirs = [versions.ranges[key] for versions in several]
        ranges[key] = range(max(their.start for their in theirs), min(their.stop for their in theirs))
    newest = max(several, key=lambda versions: versions.features_epoch)
    return BrokerVersions(ranges, newest.supported_features, newest.finalized_features, newest.features_epoch)


def is_for_kcoord(request: Message, node_id: int) -> bool:
    """Returns whether a request of CHOSEN_APIS is answered here: it is about groups, or about kcoord's own broker."""
    match request:
        case FindCoordinatorRequest():
            return request.key_type != TRANSACTION_COORDINATOR
        case ListConfigResourcesRequest():
            return set(request.resource_types) == {GROUP_RESOURCE}
        case DescribeConfigsRequest() | AlterConfigsRequest() | IncrementalAlterConfigsRequest():
            return any(_own_resources(request, node_id))
    raise AssertionError(f"{request.message_name} is always answered by the same side")


def _own_resources(
    request: DescribeConfigsRequest | AlterConfigsRequest | IncrementalAlterConfigsRequest, node_id: int
) -> list[bool]:
    """Returns for each resource whether kcoord has its configs."""
    return [
        resource.resource_type == GROUP_RESOURCE
        or (resource.resource_type == BROKER_RESOURCE and resource.resource_name == str(node_id))
        for resource in request.resources
    ]


@dataclass(frozen=True, slots=True)
class GroupSide:
    """What requests about groups meet."""

    find_coordinator: Callable[[Broker, RequestContext, FindCoordinatorRequest], FindCoordinatorResponse]
    """Answers FindCoordinator."""
    imports: GroupImports
    add_offsets: HandleFunction
    """Answers AddOffsetsToTxn."""
    check: HandleFunction | None = None
    """Raises KafkaError while no request about groups may be answered. None if there is no such time."""


def port_tables(
    config: BrokerConfig, node_id: int | None, theirs: Callable[[], BrokerVersions], groups: GroupSide
) -> Mapping[Kip1327Form, ApiTable]:
    """Returns the tables of the APIs that are answered here, by form.

    `node_id` is the broker of the upstream that the port stands for, None for kcoord's own port. `theirs` returns the
    versions of the brokers that requests of the port are passed on to.
    """
    of_broker = build_api_table(config)
    tables: dict[Kip1327Form, ApiTable] = {}
    versions = _versions_handler(node_id, tables, theirs)
    for form in Kip1327Form:
        apis = [
            _api(api, node_id, versions, groups) for api in of_broker.in_form(form).apis.values() if _is_local(api.key)
        ]
        if node_id is None:
            apis.append(_checked(import_groups_api(groups.imports), groups))
        tables[form] = ApiTable(apis, form, tables)
    return tables


def _is_local(key: ApiKey) -> bool:
    return key in GROUP_APIS or key in LOGIN_APIS or key in CHOSEN_APIS or key is ApiKey.ADD_OFFSETS_TO_TXN


def _api(api: Api, node_id: int | None, versions: HandleFunction, groups: GroupSide) -> Api:
    if api.key is ApiKey.API_VERSIONS:
        return _OwnApi(api.key, api.versions, versions)
    if api.key is ApiKey.ADD_OFFSETS_TO_TXN:
        return _checked(_OwnApi(api.key, api.versions, groups.add_offsets), groups)
    if api.key is ApiKey.FIND_COORDINATOR:
        return _checked(ImportingApi(_ChangedApi(api, groups.find_coordinator), groups.imports), groups)
    if api.key is ApiKey.TXN_OFFSET_COMMIT:
        api = _OwnApi(api.key, TXN_OFFSET_COMMIT_VERSIONS, commit_offsets)
    if api.key in GROUP_APIS and node_id is not None:
        return _ChangedApi(api, _no_groups if api.key is ApiKey.LIST_GROUPS else _not_coordinator)
    if api.key in IMPORTING_APIS:
        return _checked(ImportingApi(api, groups.imports), groups)
    if api.key in CHOSEN_APIS:
        return _checked(_ChangedApi(api, _check_config_request), groups)
    # The handler of the broker itself answers.
    return _checked(api, groups) if api.key in GROUP_APIS else api


def _checked(api: Api, groups: GroupSide) -> Api:
    return api if groups.check is None else _ChangedApi(api, groups.check)


class _OwnApi(Api):
    """An API with another `handle` than that of the broker's handler."""

    __slots__ = ("_own",)

    def __init__(self, key: ApiKey, versions: range, own: HandleFunction) -> None:
        super().__init__(key, versions)
        self._own = own

    def functions(self) -> tuple[HandleFunction, ErrorFunction]:
        return self._own, super().functions()[1]


class _ChangedApi(Api):
    """An API whose requests meet `before` first. If that returns None, the handler of the API follows."""

    __slots__ = ("_api", "_before")

    def __init__(self, api: Api, before: HandleFunction) -> None:
        super().__init__(api.key, api.versions)
        self._api = api
        self._before = before

    def functions(self) -> tuple[HandleFunction, ErrorFunction]:
        handle, error_response = self._api.functions()

        def changed(broker: Broker, context: RequestContext, request: Message) -> object:
            response = self._before(broker, context, request)
            return handle(broker, context, request) if response is None else response

        return changed, error_response


def _not_coordinator(broker: Broker, context: RequestContext, request: Message) -> Message:
    raise KafkaError(Errors.NOT_COORDINATOR, "This is not the correct coordinator.")


def _no_groups(broker: Broker, context: RequestContext, request: Message) -> Message:
    """Returns that a broker of the upstream has no groups. kcoord's own port lists all."""
    return ListGroupsResponse()


def _check_config_request(broker: Broker, context: RequestContext, request: Message) -> None:
    """Raises INVALID_REQUEST if a request is about resources of both sides, since only one side can answer."""
    if isinstance(request, ListConfigResourcesRequest):
        return
    assert isinstance(request, DescribeConfigsRequest | AlterConfigsRequest | IncrementalAlterConfigsRequest)
    if not all(_own_resources(request, broker.node_id)):
        raise KafkaError(
            Errors.INVALID_REQUEST,
            "Configs of groups and other configs cannot be in one request, because kcoord has the groups and the "
            "cluster behind it has everything else. Send two requests.",
        )


def _versions_handler(
    node_id: int | None, tables: Mapping[Kip1327Form, ApiTable], theirs: Callable[[], BrokerVersions]
) -> HandleFunction:
    """Returns the handler of ApiVersions for a port."""

    def handle(broker: Broker, context: RequestContext, request: ApiVersionsRequest) -> ApiVersionsResponse:
        own_id = broker.node_id if node_id is None else node_id
        api_versions.check(request, context.api_version, broker.cluster_id, own_id)
        local = tables[broker.config.kip1327_form(request.client_software_name)]
        context.client.identify(request.client_software_name, request.client_software_version, local.form)
        return ApiVersionsResponse(
            api_keys=[
                ApiVersionsResponse.ApiVersion(api_key=key, min_version=both.start, max_version=both.stop - 1)
                for key, both in sorted(listed_versions(theirs(), local).items())
            ],
            supported_features=api_versions.supported_feature_keys(
                _supported_features(theirs(), broker.config.kcoord_release), context.api_version
            ),
            finalized_features_epoch=max(theirs().features_epoch, 0),
            finalized_features=[
                ApiVersionsResponse.FinalizedFeatureKey(name=name, max_version_level=level, min_version_level=level)
                for name, level in sorted(_finalized_features(theirs(), broker.image.features).items())
                if level > 0
            ],
        )

    return handle


def listed_versions(theirs: BrokerVersions, local: ApiTable) -> dict[int, range]:
    """Returns the versions that ApiVersions lists: those of both sides."""
    listed = {key: api.listed_versions for key, api in local.apis.items() if key not in CHOSEN_APIS}
    if ADD_PARTITIONS_VERSION not in theirs.ranges.get(ApiKey.ADD_PARTITIONS_TO_TXN, ()):
        listed.pop(ApiKey.ADD_OFFSETS_TO_TXN)
        listed.pop(ApiKey.TXN_OFFSET_COMMIT)
    for key, forwarded in forwarded_versions(theirs).items():
        listed[key] = forwarded
        own = local.apis.get(key)
        if own is not None:
            listed[key] = range(max(own.versions.start, forwarded.start), min(own.versions.stop, forwarded.stop))
        elif local.form is Kip1327Form.CREATION_TIME and CREATION_TIME_VERSIONS.get(ApiKey(key)) == forwarded.stop:
            listed[key] = range(forwarded.start, forwarded.stop + 1)
    return {key: versions for key, versions in listed.items() if versions}


def _supported_features(theirs: BrokerVersions, release: str) -> dict[str, tuple[int, int]]:
    features = dict(theirs.supported_features)
    features[_GROUP_VERSION] = supported_features(release)[_GROUP_VERSION]
    if _TRANSACTION_VERSION in features:
        lowest, highest = features[_TRANSACTION_VERSION]
        features[_TRANSACTION_VERSION] = lowest, min(highest, HIGHEST_TRANSACTION_VERSION)
    return features


def _finalized_features(theirs: BrokerVersions, own: Mapping[str, int]) -> dict[str, int]:
    features = dict(theirs.finalized_features)
    features[_GROUP_VERSION] = own.get(_GROUP_VERSION, 0)
    features[_TRANSACTION_VERSION] = min(features.get(_TRANSACTION_VERSION, 0), HIGHEST_TRANSACTION_VERSION)
    return features
