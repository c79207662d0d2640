# SPDX-License-Identifier: Apache-2.0
"""The table of served APIs, and the steps from a received request to the bytes of its response.

A request path (`kcoord.server.net.request_path`) looks up the `BoundApi` of a frame: one API in one version. It then
decodes the request, calls `respond`, and encodes the response. Two kinds of responses wait in the path's queue:

* An `Exchange` was passed to its handler, whose response may be a future. `response_of` turns a finished future into
  a response.
* A `DeferredResponse` comes from a fast path. It is encoded already, and waits until its records are durable.

`data` of both is None while the response is not ready, and empty if the client gets none. A path may have more kinds of
`WaitingResponse`.

A handler learns about a request from its body, from the `RequestContext`, and from the `Client` of the connection. It
is imported at the first request of its API. It may raise KafkaError, which becomes the error response of its API.
Any other exception is a defect: the client gets UNKNOWN_SERVER_ERROR and the log a traceback; the connection and the
process continue. Likewise for a response that cannot be encoded. The `except Exception` clauses for that are here.

ApiVersions is made from this table, so an API that is not in it is neither served nor listed.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias, cast

from kcoord.config import BrokerConfig
from kcoord.config.kip1327 import Kip1327Form
from kcoord.runtime.result import OperationContext
from kcoord.runtime.waiting import Waiter
from kcoord.security.authorizer import Authorizer
from kcoord.server.api.authorization import Rights
from kcoord.server.api.served_versions import (
    CLIENT_ASSIGNOR_APIS,
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
    from kcoord.server.api.pieces import Pieces
    from kcoord.server.observe.client_telemetry import ClientFacts
    from kcoord.server.request_quota import RequestUse

_logger = logging.getLogger(__name__)

KEY_AND_VERSION = struct.Struct(">hh")
"""The first four bytes of every request: the API key and the version."""

HandleFunction: TypeAlias = Callable[..., object]
"""`handle(broker, context, request)` of a handler. The table only passes the broker on."""
ErrorFunction: TypeAlias = Callable[[Message, KafkaError, int], Message]

ANONYMOUS = "User:ANONYMOUS"
"""The principal of a client that has not shown who it is."""


def ignore_throttle(throttle_ms: int) -> None:
    """Replaces `Client.throttle` if there is no connection, or if it is gone."""


class Client:
    """The facts that a connection knows about its client.

    `form` is the form of KIP-1327 that the client is served. `listener_name` is empty for a client of another worker,
    which passes the request on. `principal` is the SASL user, or named by the client's TLS certificate; it is empty if
    the broker itself asks. `is_token_authenticated` is True if the client has logged in with a delegation token.
    `has_begun` is True after its first request that is served; `begins_with_api_versions` is True if that was
    ApiVersions.
    """

    __slots__ = (
        "begins_with_api_versions",
        "client_host",
        "facts",
        "form",
        "has_begun",
        "is_token_authenticated",
        "keeps_order",
        "listener_name",
        "principal",
        "remote_host",
        "remote_port",
        "software",
        "throttle",
    )

    def __init__(
        self,
        form: Kip1327Form,
        listener_name: str,
        remote_host: str = "",
        remote_port: int = 0,
        principal: str = ANONYMOUS,
    ) -> None:
        self.form = form
        self.listener_name = listener_name
        self.software = ("", "")
        self.principal = principal
        self.is_token_authenticated = False
        self.has_begun = False
        self.keeps_order = False
        """Set by a handler that returns a future: the client's later requests are not handled before that is done."""
        self.begins_with_api_versions = False
        self.facts: ClientFacts | None = None
        self.throttle: Callable[[int], None] = ignore_throttle
        """Stops reading requests of the client for a time in milliseconds. The request path sets it."""
        self.locate(remote_host, remote_port)

    def locate(self, remote_host: str, remote_port: int) -> None:
        """Sets the client's host and port; `client_host` is the host as DescribeGroups shows it."""
        self.remote_host = remote_host
        self.remote_port = remote_port
        self.client_host = f"/{remote_host}"

    def rights(self, authorizer: Authorizer, api_key: ApiKey, *, is_audited: bool = False) -> Rights:
        """Returns the client's rights for one request."""
        return Rights(authorizer, self.principal, self.remote_host, api_key, is_audited=is_audited)

    def identify(self, software_name: str, software_version: str, form: Kip1327Form) -> None:
        """Notes the software that the client names in ApiVersions, perhaps not for the first time."""
        self.software = (software_name, software_version)
        self.form = form
        if not self.has_begun:
            self.has_begun = self.begins_with_api_versions = True


class RequestContext:
    """The facts about one request besides its body: API, version, client, rights and time.

    `rights` is None if the request needs none: the broker has no authorizer, or asks itself. `frame_bytes` is the size
    of a client's request. `use` counts the time of the request; None if its client has no quota on that.
    """

    __slots__ = (
        "api_key",
        "api_version",
        "client",
        "client_id",
        "correlation_id",
        "frame_bytes",
        "now_ms",
        "rights",
        "use",
    )

    def __init__(
        self,
        api_key: ApiKey,
        api_version: int,
        correlation_id: int,
        client_id: str,
        client: Client,
        now_ms: int,
        *,
        rights: Rights | None,
        frame_bytes: int = 0,
        use: RequestUse | None = None,
    ) -> None:
        self.api_key = api_key
        self.api_version = api_version
        self.correlation_id = correlation_id
        self.client_id = client_id
        self.client = client
        self.now_ms = now_ms
        self.rights = rights
        self.frame_bytes = frame_bytes
        self.use = use

    @property
    def user(self) -> str:
        """The name of the user that quotas are for: the principal without its type."""
        return self.client.principal.partition(":")[2]

    def client_facts(self) -> ClientFacts:
        """Returns the facts about the client for telemetry; always the same object for a connection."""
        from kcoord.server.observe.client_telemetry import ClientFacts

        client = self.client
        if client.facts is None:
            name, version = client.software
            client.facts = ClientFacts(self.client_id, name, version, client.remote_host, client.remote_port)
        return client.facts

    def operation_context(self, candidate_id: str = "") -> OperationContext:
        """Returns the context of one operation of a state machine. `candidate_id` is a new identifier for a member."""
        return OperationContext(
            now_ms=self.now_ms,
            api_version=self.api_version,
            client_id=self.client_id,
            client_host=self.client.client_host,
            principal=self.client.principal,
            candidate_id=candidate_id,
            token=next(reply_tokens),
        )


CREATION_TIME_TAG: Final = 11_000
"""The tag of GroupCreationTimeMs (KIP-1327, int64) in versions without that field: ConsumerGroupHeartbeatResponse v1
and DescribedGroup v1. Readers that do not know the tag skip it. It is far above Kafka's own tags, which count from 0.
"""
TAGGED_VERSION: Final = 1

_INT64: Final = Struct(">q")


def has_creation_time_tag(context: RequestContext) -> bool:
    """Returns whether the response to a heartbeat or describe request carries the tagged field.

    Some decoders fail on tagged fields that they do not know. A client that does not begin with ApiVersions expects the
    bytes of Apache Kafka, whatever the broker is, so it gets no tagged field.
    """
    client = context.client
    return (
        context.api_version == TAGGED_VERSION
        and client.begins_with_api_versions
        and client.form is Kip1327Form.CREATION_TIME
    )


def creation_time_tag(creation_time_ms: int) -> TaggedFields:
    """Returns the tagged field, or no field if the creation time is unknown."""
    return ((CREATION_TIME_TAG, _INT64.pack(creation_time_ms)),) if creation_time_ms >= 0 else ()


class Api:
    """One served API: the versions that clients may use, and its handler, which is imported at the first request."""

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
        """The versions that ApiVersions lists."""
        return range(FIRST_LISTED_VERSIONS.get(self.key, self.versions.start), self.versions.stop)

    def functions(self) -> tuple[HandleFunction, ErrorFunction]:
        """Returns `handle` and `error_response` of the handler, and imports it if necessary."""
        if self._handle is None or self._error_response is None:
            module = importlib.import_module(f"kcoord.server.api.handlers.{self._handler}")
            self._handle, self._error_response = module.handle, module.error_response
        return self._handle, self._error_response


class BoundApi:
    """An API in one version, which request paths look up by the first four bytes of a frame."""

    __slots__ = ("_error_response", "_handle", "decode_prefix", "key", "version")

    def __init__(self, api: Api, version: int) -> None:
        self._handle, self._error_response = api.functions()
        self.key = api.key
        self.version = version
        self.decode_prefix = request_class(api.key).decode_prefix

    def respond(self, broker: object, context: RequestContext, request: Message) -> object:
        """Calls the handler. Returns a response, None for no response, CloseConnection, or a future of one of these."""
        try:
            return self._handle(broker, context, request)
        except KafkaError as error:
            return self._error_response(request, error, self.version)
        except Exception:
            _logger.exception("%s v%d from %s failed", self.key.name, self.version, context.client.client_host)
            return self._server_error(request)

    def fail(self, request: Message, error: KafkaError) -> Message:
        """Returns the response to a request that failed."""
        return self._error_response(request, error, self.version)

    def response_of(self, future: asyncio.Future[object], request: Message) -> object:
        """Returns the response of a finished future of `respond`; an error response if the future failed."""
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
        """Returns the framed response. A response that does not fit its version is a defect: UNKNOWN_SERVER_ERROR."""
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
    """All APIs that are served in one form of KIP-1327, in the order of their keys.

    `siblings` are the tables of all forms of the same broker; a connection changes to another table with its form.
    """

    __slots__ = ("_bound", "apis", "form", "siblings")

    def __init__(
        self,
        apis: Iterable[Api],
        form: Kip1327Form = Kip1327Form.CREATION_TIME,
        siblings: Mapping[Kip1327Form, ApiTable] | None = None,
    ) -> None:
        self.apis: dict[int, Api] = {int(api.key): api for api in sorted(apis, key=lambda api: api.key)}
        self.form = form
        self.siblings: Final[Mapping[Kip1327Form, ApiTable]] = siblings if siblings is not None else {}
        self._bound: dict[bytes, BoundApi] = {}

    def in_form(self, form: Kip1327Form) -> ApiTable:
        """Returns the table for connections of this form."""
        return self.siblings.get(form, self)

    def bound(self, key_and_version: bytes) -> BoundApi | None:
        """Returns the API that the first four bytes of a request name, None if it is not served in that version."""
        bound = self._bound.get(key_and_version)
        return bound if bound is not None else self._bind(key_and_version)

    def error_response(self, frame: bytes, error: KafkaError) -> bytes:
        """Returns the framed error response to a request that a fast path accepted, if its records were not written."""
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
    """Returns the APIs that a broker with this configuration serves to a client that has not named its software yet."""
    versions = dict(SERVED_VERSIONS)
    if not config.is_kafka_4_4:
        for key, first in KAFKA_4_4_VERSIONS.items():
            versions[key] = range(versions[key].start, first)
    if not config.unstable_api_versions_enable:
        for key, first in UNSTABLE_VERSIONS.items():
            versions[key] = range(versions[key].start, first)
    if not config.kcoord_client_assignors_enable:
        for key in CLIENT_ASSIGNOR_APIS:
            del versions[key]
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
    """Returned instead of a response if the client expects none: the broker reports the failure by closing."""

    reason: str


class WaitingResponse(Protocol):
    """A place in the order of a connection's responses."""

    @property
    def data(self) -> bytes | Pieces | None:
        """The framed response; None while it is not ready."""

    def abandon(self) -> None:
        """Called if the client is gone."""


class Exchange:
    """A request on the general path, with its response when that is ready."""

    __slots__ = ("body_at", "bound", "correlation_id", "data", "frame", "future", "request", "response", "rights")

    request: Message

    def __init__(self, bound: BoundApi, frame: bytes, body_at: int, correlation_id: int, rights: Rights | None) -> None:
        self.bound = bound
        self.frame = frame
        self.body_at = body_at
        self.correlation_id = correlation_id
        self.rights = rights
        self.response: object = None
        self.future: asyncio.Future[object] | None = None
        self.data: bytes | Pieces | None = None

    def decode(self) -> Message:
        """Decodes the body of the frame. Raises DecodeError."""
        self.request = self.bound.decode_prefix(self.frame, self.body_at, self.bound.version)[0]
        return self.request

    def abandon(self) -> None:
        """Ends a long poll of a client that is gone. A task of several steps continues, since it may be half done."""
        if self.future is not None and not isinstance(self.future, asyncio.Task):
            self.future.cancel()


class DeferredResponse(Waiter):
    """An encoded response that may leave after `settle`. If the shard fails, an error response leaves instead."""

    __slots__ = ("_apis", "_frame", "_on_response", "_response", "data", "on_settled")

    def __init__(self, frame: bytes, response: bytes, apis: ApiTable, on_response: Callable[[], None]) -> None:
        self._frame = frame
        self._response = response
        self._apis = apis
        self._on_response = on_response
        self.data: bytes | None = None
        self.on_settled: Callable[[], None] | None = None
        """Set by metrics only."""

    def abandon(self) -> None:
        """Does nothing: records already appended are not withdrawn."""

    def settle(self) -> None:
        self.data = self._response
        if self.on_settled is not None:
            self.on_settled()
        self._on_response()

    def fail(self, error: KafkaError) -> None:
        self._response = self._apis.error_response(self._frame, error)
        self.settle()
