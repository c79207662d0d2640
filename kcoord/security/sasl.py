# SPDX-License-Identifier: Apache-2.0
"""The authentication of one connection by SASL: frames in, answers out. Time and nonces are arguments.

Theory of operation. It follows the states of Kafka's SaslServerAuthenticator:

* VERSIONS_OR_HANDSHAKE: the client may send ApiVersions, which the broker serves as usual. After an ApiVersions without
  an error the state is HANDSHAKE. After an ApiVersions with an error the client may try again.
* HANDSHAKE: the client must send SaslHandshake, which names a mechanism. The state becomes AUTHENTICATE.
* AUTHENTICATE: each frame is a token of the mechanism. After SaslHandshake v1 it is in a SaslAuthenticate request;
  after v0 it is the frame itself. The mechanism answers each token, and in the end accepts or refuses the client.
* COMPLETE: `principal` is known, and all requests are served as usual.
* FAILED: the connection must be closed. It serves nothing any more.

A frame that does not fit the state fails the authentication. So before COMPLETE a client reaches ApiVersions only.

A session has an end if `connections.max.reauth.ms` is set, or if the credential has one: a token of OAUTHBEARER, or a
delegation token. A SaslHandshake in the state COMPLETE then begins a re-authentication (KIP-368), at most once a
second: back to AUTHENTICATE, with the same mechanism and the same principal as before. Requests are not served until it
is complete. The first request after the end of a session fails, unless it begins a re-authentication.

The texts for clients are those of Kafka. They never say whether a user exists. No text has a password or a user name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from kcoord.security.plain import PlainExchange, PlainUsers
from kcoord.security.rejection import Rejection
from kcoord.security.scram import CredentialLookup, Decoys, ScramServerExchange, TokenLogin
from kcoord.security.scram_messages import ScramError
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import DecodeError, Errors
from kcoord_protocol.framing import LENGTH_BYTES, decode_request_header, encode_response
from kcoord_protocol.messages import (
    ApiVersionsResponse,
    RequestHeader,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

if TYPE_CHECKING:
    from kcoord.security.oauthbearer import BearerExchange, BearerSettings

PLAIN: Final = "PLAIN"
OAUTHBEARER: Final = "OAUTHBEARER"

_MIN_REAUTHENTICATION_INTERVAL_MS: Final = 1000
_FIRST_VERSION_WITH_REQUESTS: Final = 1
"""After this version of SaslHandshake tokens are in SaslAuthenticate requests."""
_VERSIONS: Final = {ApiKey.SASL_HANDSHAKE: range(0, 2), ApiKey.SASL_AUTHENTICATE: range(0, 3)}
_HANDSHAKE_KEY: Final = int(ApiKey.SASL_HANDSHAKE).to_bytes(2)
_VERSIONS_KEY: Final = int(ApiKey.API_VERSIONS).to_bytes(2)


@dataclass(slots=True, frozen=True)
class SaslSettings:
    """What a listener accepts now."""

    mechanisms: Sequence[str]
    users: PlainUsers
    """The users of PLAIN."""
    credentials: CredentialLookup
    """The users of SCRAM."""
    max_reauth_ms: Mapping[str, int]
    """The length of a session by mechanism; 0 if it has no end."""
    max_token_bytes: int
    failure_delay_ms: int
    """The time after which a client learns that its authentication has failed."""
    new_nonce: Callable[[], str]
    decoys: Decoys
    bearer: BearerSettings | None = None
    """None if OAUTHBEARER is not offered. Most listeners do not load what it needs."""
    tokens: Callable[[str, str, int], TokenLogin | None] | None = None
    """Returns the login of (mechanism, id of a delegation token) at a time. None if the broker has no such tokens."""


@dataclass(slots=True, frozen=True)
class SaslStep:
    """The answer to a frame: framed bytes for the client, and why the connection must be closed, if it must.

    If `delay_ms` is not 0, `output` leaves after that time, and then the connection is closed.
    """

    output: bytes = b""
    failure: str | None = None
    delay_ms: int = 0
    is_authentication: bool = True
    """False if a session is over, so that no authentication has failed."""


class _State(Enum):
    VERSIONS_OR_HANDSHAKE = auto()
    HANDSHAKE = auto()
    AUTHENTICATE = auto()
    COMPLETE = auto()
    FAILED = auto()


class SaslAuthenticator:
    """The authentication of one connection; the module describes its states.

    `settings` returns the settings of the listener. They are asked for at each handshake, since they may change.
    """

    def __init__(self, settings: Callable[[], SaslSettings]) -> None:
        self._current_settings = settings
        self._settings = settings()
        self._state = _State.VERSIONS_OR_HANDSHAKE
        self.mechanism = ""
        """The mechanism that the client has named last; empty before that."""
        self._exchange: PlainExchange | ScramServerExchange | BearerExchange | None = None
        self._has_requests = False
        self._previous_mechanism: str | None = None
        """The mechanism of the session that is being renewed, None if this is the first authentication."""
        self._reauthentication_began_ms: int | None = None
        self.principal: str | None = None
        self.session_end_ms: int | None = None
        self.is_token_authenticated = False
        """True if the client has logged in with a delegation token."""

    @property
    def is_complete(self) -> bool:
        """True while requests are served."""
        return self._state is _State.COMPLETE

    def versions_answered(self) -> None:
        """Called when an ApiVersions request got a response without an error."""
        if self._state is _State.VERSIONS_OR_HANDSHAKE:
            self._state = _State.HANDSHAKE

    def receive(self, frame: bytes, now_ms: int) -> SaslStep | None:
        """Returns the answer to a frame, None if it is a request to serve as usual."""
        if self._state is _State.COMPLETE:
            return self._receive_when_complete(frame, now_ms)
        if self._state is _State.FAILED:
            return SaslStep(failure="the authentication has failed")
        if len(frame) > self._settings.max_token_bytes:
            return self._fail("Failing SASL authentication due to invalid receive size", is_delayed=True)
        if self._state is _State.AUTHENTICATE:
            return self._receive_token(frame, now_ms) if self._has_requests else self._receive_raw(frame, now_ms)
        if frame[:2] == _VERSIONS_KEY:
            if self._state is _State.VERSIONS_OR_HANDSHAKE:
                return None
            return self._fail("ApiVersions came a second time during the SASL handshake")
        return self._shake_hands(frame, now_ms)

    def _receive_when_complete(self, frame: bytes, now_ms: int) -> SaslStep | None:
        end_ms, began_ms = self.session_end_ms, self._reauthentication_began_ms
        if end_ms is None:
            return None
        if frame[:2] == _HANDSHAKE_KEY and (began_ms is None or now_ms - began_ms >= _MIN_REAUTHENTICATION_INTERVAL_MS):
            self._reauthentication_began_ms = now_ms
            self._previous_mechanism = self.mechanism
            return self._shake_hands(frame, now_ms)
        if now_ms <= end_ms:
            return None
        return replace(self._fail("the session has expired, see connections.max.reauth.ms"), is_authentication=False)

    # --- the handshake ------------------------------------------------------------------------------------------------

    def _shake_hands(self, frame: bytes, now_ms: int) -> SaslStep:
        settings = self._settings = self._current_settings()
        try:
            header, position = _header(frame, ApiKey.SASL_HANDSHAKE)
            request = SaslHandshakeRequest.decode_prefix(frame, position, header.request_api_version)[0]
        except DecodeError as error:
            return self._fail(f"a valid SaslHandshake request was expected: {error}")
        self._has_requests = header.request_api_version >= _FIRST_VERSION_WITH_REQUESTS
        is_offered = request.mechanism in settings.mechanisms
        response = SaslHandshakeResponse(
            error_code=Errors.NONE if is_offered else Errors.UNSUPPORTED_SASL_MECHANISM,
            mechanisms=list(settings.mechanisms),
        )
        output = _framed(header, response.encode(header.request_api_version))
        if not is_offered:
            return self._fail("the client asks for a SASL mechanism that is not enabled", output, is_delayed=True)
        self.mechanism = request.mechanism
        self._exchange = self._new_exchange(now_ms)
        self._state = _State.AUTHENTICATE
        return SaslStep(output)

    def _new_exchange(self, now_ms: int) -> PlainExchange | ScramServerExchange | BearerExchange:
        settings = self._settings
        if self.mechanism == PLAIN:
            return PlainExchange(settings.users)
        if self.mechanism == OAUTHBEARER:
            assert settings.bearer is not None, "the listener offers OAUTHBEARER"
            return settings.bearer.new_exchange(now_ms)
        tokens = settings.tokens
        return ScramServerExchange(
            self.mechanism,
            settings.credentials,
            settings.new_nonce(),
            settings.decoys,
            None if tokens is None else lambda mechanism, token_id: tokens(mechanism, token_id, now_ms),
        )

    # --- the exchange -------------------------------------------------------------------------------------------------

    def _refuse_versions(self, frame: bytes) -> SaslStep:
        """Refuses ApiVersions between the handshake and the end of the login. Other requests get no answer there."""
        reason = "ApiVersions came during the SASL authentication"
        try:
            header = decode_request_header(frame)[0]
        except DecodeError:
            return self._fail(reason)
        response = ApiVersionsResponse(error_code=Errors.ILLEGAL_SASL_STATE)
        version = header.request_api_version if header.request_api_version in ApiVersionsResponse.valid_versions else 0
        output = encode_response(header.correlation_id, ApiKey.API_VERSIONS, version, response.encode(version))
        return self._fail(reason, output, is_delayed=True)

    def _receive_token(self, frame: bytes, now_ms: int) -> SaslStep:
        if frame[:2] == _VERSIONS_KEY:
            return self._refuse_versions(frame)
        try:
            header, position = _header(frame, ApiKey.SASL_AUTHENTICATE)
            version = header.request_api_version
            request = SaslAuthenticateRequest.decode_prefix(frame, position, version)[0]
        except DecodeError as error:
            return self._fail(f"a valid SaslAuthenticate request was expected: {error}")
        try:
            token = self._respond(request.auth_bytes)
        except (Rejection, ScramError) as error:
            rejected = SaslAuthenticateResponse(
                error_code=Errors.SASL_AUTHENTICATION_FAILED, error_message=self._client_text(error)
            )
            return self._fail(self._log_text(error), _framed(header, rejected.encode(version)), is_delayed=True)
        lifetime_ms = self._complete(now_ms) if self._is_accepted else 0
        response = SaslAuthenticateResponse(auth_bytes=token, session_lifetime_ms=lifetime_ms)
        return SaslStep(_framed(header, response.encode(version)))

    def _receive_raw(self, frame: bytes, now_ms: int) -> SaslStep:
        try:
            token = self._respond(frame)
        except (Rejection, ScramError) as error:
            # Without a request there is no response that could carry an error.
            return self._fail(self._log_text(error), is_delayed=True)
        if self._is_accepted:
            self._complete(now_ms)
        return SaslStep(len(token).to_bytes(LENGTH_BYTES) + token)

    @property
    def _is_accepted(self) -> bool:
        return self._exchange is not None and self._exchange.is_complete

    def _respond(self, token: bytes) -> bytes:
        """Returns the mechanism's answer; raises Rejection or ScramError."""
        exchange, previous = self._exchange, self._previous_mechanism
        assert exchange is not None
        if previous not in (None, self.mechanism):
            text = (
                f"SASL mechanism '{self.mechanism}' requested by client is not supported for re-authentication "
                f"of mechanism '{previous}'"
            )
            raise Rejection(text, text)
        answer = exchange.respond(token)
        principal = f"User:{exchange.user}"
        if exchange.is_complete and self.principal not in (None, principal):
            old, new = str(self.principal).replace(":", ".", 1), principal.replace(":", ".", 1)
            text = f"Cannot change principals during re-authentication from {old}: {new}"
            raise Rejection("the client cannot change its principal during re-authentication", text)
        return answer

    def _complete(self, now_ms: int) -> int:
        """Begins the session and returns its length, 0 if it has no end."""
        assert self._exchange is not None
        self.principal = f"User:{self._exchange.user}"
        credential_end_ms = self._exchange.credential_end_ms
        self.is_token_authenticated = isinstance(self._exchange, ScramServerExchange) and self._exchange.is_token_login
        self._exchange = None
        self._state = _State.COMPLETE
        max_reauth_ms = self._settings.max_reauth_ms.get(self.mechanism, 0)
        lifetimes_ms = [max_reauth_ms] if max_reauth_ms > 0 else []
        if credential_end_ms is not None:
            lifetimes_ms.append(max(credential_end_ms - now_ms, 0))
        lifetime_ms = min(lifetimes_ms, default=0)
        self.session_end_ms = now_ms + lifetime_ms if lifetimes_ms else None
        return lifetime_ms

    # --- failures -----------------------------------------------------------------------------------------------------

    def _client_text(self, error: Rejection | ScramError) -> str:
        if isinstance(error, Rejection) and error.client_text is not None:
            return error.client_text
        phase = "authentication" if self._previous_mechanism is None else "re-authentication"
        return f"Authentication failed during {phase} due to invalid credentials with SASL mechanism {self.mechanism}"

    def _log_text(self, error: Rejection | ScramError) -> str:
        return f"the authentication with {self.mechanism} failed: {error}"

    def _fail(self, reason: str, output: bytes = b"", *, is_delayed: bool = False) -> SaslStep:
        self._state = _State.FAILED
        self._exchange = None
        return SaslStep(output, reason, self._settings.failure_delay_ms if is_delayed else 0)


def _header(frame: bytes, key: ApiKey) -> tuple[RequestHeader, int]:
    """Returns the header of a request and the position of its body; raises DecodeError if it is not of this API."""
    header, position = decode_request_header(frame)
    if header.request_api_key != key or header.request_api_version not in _VERSIONS[key]:
        raise DecodeError(f"api key {header.request_api_key} v{header.request_api_version} is not allowed here")
    return header, position


def _framed(header: RequestHeader, body: bytes) -> bytes:
    return encode_response(header.correlation_id, header.request_api_key, header.request_api_version, body)
