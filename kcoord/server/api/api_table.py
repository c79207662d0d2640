# SPDX-License-Identifier: Apache-2.0
"""The table of served APIs, and the path from a received request to the bytes of its response.

`RequestContext` is what a handler knows about one request besides its body, `Client` what the connection knows about
its client. Two kinds of responses wait in the queue of a request path: an `Exchange` was handed to its handler, whose
answer may be a future; a `DeferredResponse` comes from a fast path, is already encoded, and waits for its records to be
durable. `data` of both is None while the response is not known, and empty if the client gets none.

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
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from kcoord.config import BrokerConfig
from kcoord.config.kip1327 import Kip1327Form
from kcoord.runtime.result import OperationContext
from kcoord.runtime.waiting import Waiter
from kcoord.server.api.served_versions import (
    FIRST_LISTED_VERSIONS,
    KAFKA_4_4_VERSIONS,
    KIP_1327_VERSIONS,
    NEW_PARTITIONS_HANDLER,
    SERVED_VERSIONS,
    UNSTABLE_VERSIONS,
)
from kcoord.server.replies import reply_tokens
from kcoord_protocol.api_keys import ApiKey, request_class
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.framing import decode_request_header, encode_response
from kcoord_protocol.message import TaggedFields
from kcoord_protocol.messages import Message

if TYPE_CHECKING:
    from kcoord.server.observe.client_telemetry import ClientFacts


class Client:
    """What a connection knows about its client.

    `form` is the form of KIP-1327 that the client is served. `has_begun` is True after its first request that is
    answered; `begins_with_api_versions` says that this was ApiVersions.
    """

    __slots__ = (
        "address",
        "begins_with_api_versions",
        "facts",
        "form",
        "has_begun",
        "remote_host",
        "remote_port",
        "software",
    )

    def __init__(self, form: Kip1327Form, remote_host: str = "", remote_port: int = 0) -> None:
        self.form = form
        self.software = ("", "")
        self.has_begun = False
        self.begins_with_api_versions = False
        self.facts: ClientFacts | None = None
        self.locate(remote_host, remote_port)

    def locate(self, remote_host: str, remote_port: int) -> None:
        """Sets where the client is; `address` is the host in the form that groups describe."""
        self.remote_host = remote_host
        self.remote_port = remote_port
        self.address = f"/{remote_host}"

    def identify(self, software_name: str, software_version: str, form: Kip1327Form) -> None:
        """The client has named its software in ApiVersions, perhaps not for the first time."""
        self.software = (software_name, software_version)
        self.form = form
        if not self.has_begun:
            self.has_begun = self.begins_with_api_versions = True


class RequestContext:
    """The facts about one request: from where, by whom, when, in which version."""

    __slots__ = (
        "api_key",
        "api_version",
        "client",
        "client_host",
        "client_id",
        "correlation_id",
        "listener_name",
        "now_ms",
        "principal",
    )

    def __init__(
        self,
        api_key: ApiKey,
        api_version: int,
        correlation_id: int,
        client_id: str,
        client_host: str,
        listener_name: str,
        principal: str,
        now_ms: int,
        client: Client | None = None,
    ) -> None:
        self.api_key = api_key
        self.api_version = api_version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.client_host = client_host
        self.listener_name = listener_name
        self.principal = principal
        self.now_ms = now_ms
        self.client = client

    def client_facts(self) -> ClientFacts:
        """What is known about the client of the connection; the same object as long as that lasts."""
        from kcoord.server.observe.client_telemetry import ClientFacts

        client = self.client
        if client is None:
            return ClientFacts(client_id=self.client_id)
        if client.facts is None:
            name, version = client.software
            client.facts = ClientFacts(self.client_id, name, version, client.remote_host, client.remote_port)
        return client.facts

    def operation_context(self, candidate_id: str = "") -> OperationContext:
        """The context for one operation of a state machine; `candidate_id` is a fresh identifier for a member."""
        return OperationContext(
            now_ms=self.now_ms,
            api_version=self.api_version,
            client_id=self.client_id,
            client_host=self.client_host,
            candidate_id=candidate_id,
            token=next(reply_tokens),
        )


CREATION_TIME_TAG: Final = 11_000
"""KIP-1327 for versions that have no field for it: GroupCreationTimeMs (int64) in ConsumerGroupHeartbeatResponse and in
DescribedGroup, both v1. Readers that do not know it skip it. Far above the tags that Kafka counts from 0.
"""
TAGGED_VERSION: Final = 1

_INT64: Final = Struct(">q")


def has_creation_time_tag(context: RequestContext) -> bool:
    """Whether the response to a heartbeat or describe request carries the tagged field.

    Some decoders fail on tagged fields that they do not know. A client that does not begin with ApiVersions expects the
    bytes of Apache Kafka, whatever the broker is, so it gets no tagged field.
    """
    client = context.client
    return (
        context.api_version == TAGGED_VERSION
        and client is not None
        and client.begins_with_api_versions
        and client.form is Kip1327Form.CREATION_TIME
    )


def creation_time_tag(creation_time_ms: int) -> TaggedFields:
    """The tagged field; none if the creation time is unknown."""
    return ((CREATION_TIME_TAG, _INT64.pack(creation_time_ms)),) if creation_time_ms >= 0 else ()


_logger = logging.getLogger(__name__)

KEY_AND_VERSION = struct.Struct(">hh")
"""How every request begins: the API key and the version."""

HandleFunction: TypeAlias = Callable[..., object]
"""`handle(broker, context, request)` of a handler. The table passes the broker on and does not know it."""
ErrorFunction: TypeAlias = Callable[[Message, KafkaError, int], Message]


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

    def respond(self, broker: object, context: RequestContext, request: Message) -> object:
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


@dataclass(frozen=True, slots=True)
class CloseConnection:
    """Instead of a response: the client expects none, and the broker reports the failure by closing."""

    reason: str


class Exchange:
    """A request that is decoded and handled, with its response once that is known."""

    __slots__ = ("body_at", "bound", "correlation_id", "data", "frame", "future", "request", "response")

    request: Message

    def __init__(self, bound: BoundApi, frame: bytes, body_at: int, correlation_id: int) -> None:
        self.bound = bound
        self.frame = frame
        self.body_at = body_at
        self.correlation_id = correlation_id
        self.response: object = None
        self.future: asyncio.Future[object] | None = None
        self.data: bytes | None = None

    def decode(self) -> Message:
        """Decodes the body of the frame; raises DecodeError."""
        self.request = self.bound.decode_prefix(self.frame, self.body_at, self.bound.version)[0]
        return self.request

    def abandon(self) -> None:
        """The client is gone: ends a long poll. Work of several steps (a task) continues, since it may be half done."""
        if self.future is not None and not isinstance(self.future, asyncio.Task):
            self.future.cancel()


class DeferredResponse(Waiter):
    """An encoded response that leaves when its shard calls `settle`. If the shard fails, an error leaves instead."""

    __slots__ = ("_apis", "_frame", "_on_answer", "_response", "data", "on_settled")

    def __init__(self, frame: bytes, response: bytes, apis: ApiTable, on_answer: Callable[[], None]) -> None:
        self._frame = frame
        self._response = response
        self._apis = apis
        self._on_answer = on_answer
        self.data: bytes | None = None
        self.on_settled: Callable[[], None] | None = None
        """Set by metrics only."""

    def abandon(self) -> None:
        """Does nothing: records already appended are not withdrawn."""

    def settle(self) -> None:
        self.data = self._response
        if self.on_settled is not None:
            self.on_settled()
        self._on_answer()

    def fail(self, error: KafkaError) -> None:
        self._response = self._apis.error_response(self._frame, error)
        self.settle()
