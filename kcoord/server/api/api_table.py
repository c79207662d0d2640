# SPDX-License-Identifier: Apache-2.0
"""The table of served APIs, and the path from a decoded request to the bytes of its answer.

ApiVersions is made from this table: what is not here is neither served nor listed. The two `except Exception` of the
request path are here: a defect in a handler costs its client an UNKNOWN_SERVER_ERROR and us a traceback in the log,
never the connection or the process.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, cast

from kcoord.config.kip1327 import Kip1327Form
from kcoord_protocol.api_keys import ApiKey, request_class
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.headers import decode_request_header, encode_response

if TYPE_CHECKING:
    from kcoord.config import BrokerConfig
    from kcoord.server.api.request_context import RequestContext
    from kcoord.server.broker import Broker
    from kcoord_protocol.messages import Message

_logger = logging.getLogger(__name__)

KEY_AND_VERSION = struct.Struct(">hh")
"""How every request begins: the API key and the version."""

KIP_1327_VERSIONS = {
    ApiKey.METADATA: 14,
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: 1,
    ApiKey.CONSUMER_GROUP_HEARTBEAT: 2,
    ApiKey.CONSUMER_GROUP_DESCRIBE: 2,
}
"""The first version of each API that KIP-1327 adds. Connections of the form `off` have none of them."""

NEW_PARTITIONS_HANDLER = "consumer_group_heartbeat_new_partitions"
"""The handler of ConsumerGroupHeartbeat for the form `new-partitions`, whose v2 has another layout."""

KAFKA_4_4_VERSIONS = {ApiKey.API_VERSIONS: 5, ApiKey.TXN_OFFSET_COMMIT: 6, ApiKey.DELETE_GROUPS: 3}
"""The first version of each API that Kafka 4.4 adds; `kcoord.release=4.3` hides them."""

UNSTABLE_VERSIONS = {ApiKey.INIT_PRODUCER_ID: 6}
"""The first version of each API that is not final in Kafka 4.4; `unstable.api.versions.enable` shows them."""

SERVED_VERSIONS: dict[ApiKey, range] = {
    ApiKey.PRODUCE: range(0, 14),
    ApiKey.FETCH: range(4, 19),
    ApiKey.LIST_OFFSETS: range(1, 12),
    ApiKey.METADATA: range(0, 15),
    ApiKey.OFFSET_COMMIT: range(1, 11),
    ApiKey.OFFSET_FETCH: range(1, 11),
    ApiKey.FIND_COORDINATOR: range(0, 7),
    ApiKey.JOIN_GROUP: range(0, 10),
    ApiKey.HEARTBEAT: range(0, 5),
    ApiKey.LEAVE_GROUP: range(0, 6),
    ApiKey.SYNC_GROUP: range(0, 6),
    ApiKey.DESCRIBE_GROUPS: range(0, 7),
    ApiKey.LIST_GROUPS: range(0, 6),
    ApiKey.API_VERSIONS: range(0, 6),
    ApiKey.CREATE_TOPICS: range(2, 8),
    ApiKey.DELETE_TOPICS: range(1, 7),
    ApiKey.DELETE_RECORDS: range(0, 3),
    ApiKey.INIT_PRODUCER_ID: range(0, 7),
    ApiKey.OFFSET_FOR_LEADER_EPOCH: range(2, 5),
    ApiKey.ADD_PARTITIONS_TO_TXN: range(0, 6),
    ApiKey.ADD_OFFSETS_TO_TXN: range(0, 5),
    ApiKey.END_TXN: range(0, 6),
    ApiKey.WRITE_TXN_MARKERS: range(1, 3),
    ApiKey.TXN_OFFSET_COMMIT: range(0, 7),
    ApiKey.DESCRIBE_ACLS: range(1, 4),
    ApiKey.CREATE_ACLS: range(1, 4),
    ApiKey.DELETE_ACLS: range(1, 4),
    ApiKey.DESCRIBE_CONFIGS: range(1, 5),
    ApiKey.ALTER_CONFIGS: range(0, 3),
    ApiKey.ALTER_REPLICA_LOG_DIRS: range(1, 3),
    ApiKey.DESCRIBE_LOG_DIRS: range(1, 6),
    ApiKey.CREATE_PARTITIONS: range(0, 4),
    ApiKey.DELETE_GROUPS: range(0, 4),
    ApiKey.ELECT_LEADERS: range(0, 3),
    ApiKey.INCREMENTAL_ALTER_CONFIGS: range(0, 2),
    ApiKey.ALTER_PARTITION_REASSIGNMENTS: range(0, 2),
    ApiKey.LIST_PARTITION_REASSIGNMENTS: range(0, 1),
    ApiKey.OFFSET_DELETE: range(0, 1),
    ApiKey.DESCRIBE_CLIENT_QUOTAS: range(0, 2),
    ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS: range(0, 1),
    ApiKey.DESCRIBE_QUORUM: range(0, 3),
    ApiKey.UPDATE_FEATURES: range(0, 3),
    ApiKey.DESCRIBE_CLUSTER: range(0, 3),
    ApiKey.DESCRIBE_PRODUCERS: range(0, 1),
    ApiKey.UNREGISTER_BROKER: range(0, 1),
    ApiKey.DESCRIBE_TRANSACTIONS: range(0, 1),
    ApiKey.LIST_TRANSACTIONS: range(0, 3),
    ApiKey.CONSUMER_GROUP_HEARTBEAT: range(0, 3),
    ApiKey.CONSUMER_GROUP_DESCRIBE: range(0, 3),
    ApiKey.GET_TELEMETRY_SUBSCRIPTIONS: range(0, 1),
    ApiKey.PUSH_TELEMETRY: range(0, 1),
    ApiKey.LIST_CONFIG_RESOURCES: range(0, 2),
    ApiKey.DESCRIBE_TOPIC_PARTITIONS: range(0, 2),
}
"""What is served. The handler of an API is `kcoord.server.api.handlers.<its name>`, imported at its first request:
all of them together would be most of the start. A test holds this table against the VERSIONS of the handlers. As Kafka
does, Produce lists versions 0 to 2 for the sake of old librdkafka, and refuses them.
"""

TELEMETRY_APIS = (ApiKey.GET_TELEMETRY_SUBSCRIPTIONS, ApiKey.PUSH_TELEMETRY)
"""Served always, but not always listed."""

FIRST_LISTED_VERSIONS = {ApiKey.OFFSET_COMMIT: 2}
"""Where ApiVersions begins later than what is served: as in Kafka's list. Clients that send OffsetCommit v1 are older
than that request.
"""

HandleFunction = Callable[["Broker", "RequestContext", "Message"], object]
ErrorFunction = Callable[["Message", KafkaError, int], "Message"]


class Api:
    """One served API: the versions that clients may use, and its handler, which is imported when it is first needed."""

    __slots__ = ("_error_response", "_handle", "_handler", "key", "versions")

    def __init__(
        self,
        key: ApiKey,
        versions: range,
        handle: HandleFunction | None = None,
        error_response: ErrorFunction | None = None,
        handler: str | None = None,
    ) -> None:
        self.key = key
        self.versions = versions
        self._handler = handler or key.name.lower()
        self._handle = handle
        self._error_response = error_response

    @property
    def listed_versions(self) -> range:
        """What ApiVersions tells of."""
        return range(FIRST_LISTED_VERSIONS.get(self.key, self.versions.start), self.versions.stop)

    def functions(self) -> tuple[HandleFunction, ErrorFunction]:
        """`handle` and `error_response` of the handler."""
        if self._handle is None or self._error_response is None:
            module = importlib.import_module(f"kcoord.server.api.handlers.{self._handler}")
            self._handle, self._error_response = module.handle, module.error_response
        return self._handle, self._error_response


class BoundApi:
    """An API in one version: what a connection needs per request, looked up by the first four bytes of a frame."""

    __slots__ = ("_error_response", "_handle", "decode_prefix", "key", "version")

    def __init__(self, api: Api, version: int) -> None:
        self._handle, self._error_response = api.functions()
        self.key = api.key
        self.version = version
        self.decode_prefix = request_class(api.key).decode_prefix

    def respond(self, broker: Broker, context: RequestContext, request: Message) -> object:
        """The response, None (nothing is to be sent), or a future of one of them."""
        try:
            return self._handle(broker, context, request)
        except KafkaError as error:
            return self._error_response(request, error, self.version)
        except Exception:
            _logger.exception("%s v%d from %s failed", self.key.name, self.version, context.client_host)
            return self._server_error(request)

    def fail(self, request: Message, error: KafkaError) -> Message:
        """The response to a request that failed."""
        return self._error_response(request, error, self.version)

    def settle(self, future: asyncio.Future[object], request: Message) -> object:
        """The response that a finished future of `respond` stands for."""
        if future.cancelled():
            error = KafkaError(Errors.NOT_COORDINATOR, "The broker is shutting down.")
            return self._error_response(request, error, self.version)
        failure = future.exception()
        if failure is None:
            return future.result()
        if isinstance(failure, KafkaError):
            return self._error_response(request, failure, self.version)
        _logger.error("%s v%d failed", self.key.name, self.version, exc_info=failure)
        return self._server_error(request)

    def encode(self, correlation_id: int, response: object, request: Message) -> bytes:
        """The framed answer; a response that does not fit its version is a defect and becomes UNKNOWN_SERVER_ERROR."""
        message = cast("Message", response)
        try:
            return encode_response(correlation_id, self.key, self.version, message.encode(self.version))
        except Exception:
            _logger.exception("The response to %s v%d cannot be encoded", self.key.name, self.version)
        return encode_response(correlation_id, self.key, self.version, self._server_error(request).encode(self.version))

    def _server_error(self, request: Message) -> Message:
        error = KafkaError(Errors.UNKNOWN_SERVER_ERROR, "An internal error occurred; see the log of the broker.")
        return self._error_response(request, error, self.version)


class ApiTable:
    """All served APIs in the order of their keys, in one form of KIP-1327; `bound` is the lookup of the request path.

    `siblings` are the tables of the other forms, which other connections of the same broker use.
    """

    __slots__ = ("_bound", "_siblings", "apis", "form")

    def __init__(
        self,
        apis: Iterable[Api],
        form: Kip1327Form = Kip1327Form.CREATION_TIME,
        siblings: Mapping[Kip1327Form, ApiTable] | None = None,
    ) -> None:
        self.apis: dict[int, Api] = {int(api.key): api for api in sorted(apis, key=lambda api: api.key)}
        self.form = form
        self._siblings: Mapping[Kip1327Form, ApiTable] = siblings if siblings is not None else {}
        self._bound: dict[bytes, BoundApi] = {}

    def in_form(self, form: Kip1327Form) -> ApiTable:
        """The table of the same broker for connections of that form."""
        return self._siblings.get(form, self)

    def bound(self, key_and_version: bytes) -> BoundApi | None:
        """The API named by the first four bytes of a request, None where it is not served in that version."""
        bound = self._bound.get(key_and_version)
        return bound if bound is not None else self._bind(key_and_version)

    def error_response(self, frame: bytes, error: KafkaError) -> bytes:
        """The framed response to a request that a fast path has accepted, and whose records could not be written."""
        bound = self.bound(frame[: KEY_AND_VERSION.size])
        assert bound is not None, "fast paths accept only requests that are served"
        header, offset = decode_request_header(frame)
        request, _ = bound.decode_prefix(frame, offset, bound.version)
        return bound.encode(header.correlation_id, bound.fail(request, error), request)

    def _bind(self, key_and_version: bytes) -> BoundApi | None:
        if len(key_and_version) < KEY_AND_VERSION.size:
            return None
        key, version = KEY_AND_VERSION.unpack(key_and_version)
        api = self.apis.get(key)
        if api is None or version not in api.versions or version not in request_class(key).valid_versions:
            return None
        bound = self._bound[key_and_version] = self.new_bound(api, version)
        return bound

    def new_bound(self, api: Api, version: int) -> BoundApi:
        return BoundApi(api, version)


def build_api_table(config: BrokerConfig) -> ApiTable:
    """The APIs that a broker with this configuration serves to a client that has not named itself yet."""
    versions = dict(SERVED_VERSIONS)
    if not config.is_kafka_4_4:
        for key, first in KAFKA_4_4_VERSIONS.items():
            versions[key] = range(versions[key].start, first)
    if not config.unstable_api_versions_enable:
        for key, first in UNSTABLE_VERSIONS.items():
            versions[key] = range(versions[key].start, first)
    tables: dict[Kip1327Form, ApiTable] = {}
    for form in Kip1327Form:
        tables[form] = ApiTable(_apis_in_form(form, versions), form, tables)
    return tables[config.kip1327_form("")]


def _apis_in_form(form: Kip1327Form, versions: Mapping[ApiKey, range]) -> Iterable[Api]:
    for key, served in versions.items():
        first = KIP_1327_VERSIONS.get(key)
        if first is None or form is Kip1327Form.CREATION_TIME:
            yield Api(key, served)
        elif form is Kip1327Form.NEW_PARTITIONS and key is ApiKey.CONSUMER_GROUP_HEARTBEAT:
            yield Api(key, served, handler=NEW_PARTITIONS_HANDLER)
        else:
            yield Api(key, range(served.start, first))
