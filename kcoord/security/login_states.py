# SPDX-License-Identifier: Apache-2.0
"""The states of the login of one connection by SASL: frames in, answers out. Time is an argument. Pure.

Theory of operation. It follows the states of Kafka's SaslServerAuthenticator:

* VERSIONS_OR_HANDSHAKE: the client may send ApiVersions, which the broker serves as usual. After an ApiVersions without
  an error the state is HANDSHAKE. After an ApiVersions with an error the client may try again.
* HANDSHAKE: the client must send SaslHandshake, which names a mechanism. The state becomes AUTHENTICATE.
* AUTHENTICATE: each frame is a token of the mechanism. After SaslHandshake v1 it is in a SaslAuthenticate request;
  after v0 it is the frame itself. Each token is answered, and in the end the client is accepted or refused.
* RELAYING: another broker has to answer the last frame first (`kcoord.security.relayed_login`). No frame may come.
* COMPLETE: `principal` is known, and all requests are served as usual.
* FAILED: the connection must be closed. It serves nothing any more.

A frame that does not fit the state fails the authentication. So before COMPLETE a client reaches ApiVersions only.

A session may have an end. A SaslHandshake in the state COMPLETE then begins a re-authentication (KIP-368), at most once
a second: back to AUTHENTICATE, with the same mechanism and the same principal as before. Requests are not served until
it is complete. The first request after the end of a session fails, unless it begins a re-authentication.

The texts for clients are those of Kafka. They never say whether a user exists. No text has a password or a user name.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final

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

_MIN_REAUTHENTICATION_INTERVAL_MS: Final = 1000
_FIRST_VERSION_WITH_REQUESTS: Final = 1
"""After this version of SaslHandshake tokens are in SaslAuthenticate requests."""
_VERSIONS: Final = {ApiKey.SASL_HANDSHAKE: range(0, 2), ApiKey.SASL_AUTHENTICATE: range(0, 3)}
_HANDSHAKE_KEY: Final = int(ApiKey.SASL_HANDSHAKE).to_bytes(2)
_VERSIONS_KEY: Final = int(ApiKey.API_VERSIONS).to_bytes(2)


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


class LoginState(Enum):
    """The states that the module describes."""

    VERSIONS_OR_HANDSHAKE = auto()
    HANDSHAKE = auto()
    AUTHENTICATE = auto()
    RELAYING = auto()
    COMPLETE = auto()
    FAILED = auto()


class LoginStates(ABC):
    """The login of one connection. A subclass decides about handshakes and tokens."""

    def __init__(self) -> None:
        self._state = LoginState.VERSIONS_OR_HANDSHAKE
        self.mechanism = ""
        """The mechanism that the client has named last; empty before that."""
        self._has_requests = False
        self._previous_mechanism: str | None = None
        """The mechanism of the session that is being renewed, None if this is the first authentication."""
        self._reauthentication_began_ms: int | None = None
        self.principal: str | None = None
        self.session_end_ms: int | None = None
        self.is_token_authenticated = False
        """True if the client has logged in with a delegation token."""

    @property
    @abstractmethod
    def max_token_bytes(self) -> int:
        """The largest frame before the login is complete."""

    @property
    @abstractmethod
    def failure_delay_ms(self) -> int:
        """The time after which a client learns that its authentication has failed."""

    @abstractmethod
    def _shake_hands(self, header: RequestHeader, mechanism: str, now_ms: int) -> SaslStep:
        """Returns the answer to a SaslHandshake. Sets `mechanism` and the state."""

    @abstractmethod
    def _authenticate(self, header: RequestHeader | None, token: bytes, now_ms: int) -> SaslStep:
        """Returns the answer to a token. `header` is that of its SaslAuthenticate, None if it had no request."""

    @property
    def is_complete(self) -> bool:
        """True while requests are served."""
        return self._state is LoginState.COMPLETE

    def versions_answered(self) -> None:
        """Called when an ApiVersions request got a response without an error."""
        if self._state is LoginState.VERSIONS_OR_HANDSHAKE:
            self._state = LoginState.HANDSHAKE

    def receive(self, frame: bytes, now_ms: int) -> SaslStep | None:
        """Returns the answer to a frame, None if it is a request to serve as usual."""
        if self._state is LoginState.COMPLETE:
            return self._receive_when_complete(frame, now_ms)
        if self._state is LoginState.FAILED:
            return SaslStep(failure="the authentication has failed")
        if self._state is LoginState.RELAYING:
            return self._fail("a request came before the answer to the last one of the authentication")
        if len(frame) > self.max_token_bytes:
            return self._fail("Failing SASL authentication due to invalid receive size", is_delayed=True)
        if self._state is LoginState.AUTHENTICATE:
            return self._receive_token(frame, now_ms) if self._has_requests else self._authenticate(None, frame, now_ms)
        if frame[:2] == _VERSIONS_KEY:
            if self._state is LoginState.VERSIONS_OR_HANDSHAKE:
                return None
            return self._fail("ApiVersions came a second time during the SASL handshake")
        return self._receive_handshake(frame, now_ms)

    def _receive_when_complete(self, frame: bytes, now_ms: int) -> SaslStep | None:
        end_ms, began_ms = self.session_end_ms, self._reauthentication_began_ms
        if end_ms is None:
            return None
        if frame[:2] == _HANDSHAKE_KEY and (began_ms is None or now_ms - began_ms >= _MIN_REAUTHENTICATION_INTERVAL_MS):
            self._reauthentication_began_ms = now_ms
            self._previous_mechanism = self.mechanism
            return self._receive_handshake(frame, now_ms)
        if now_ms <= end_ms:
            return None
        return replace(self._fail("the session has expired, see connections.max.reauth.ms"), is_authentication=False)

    def _receive_handshake(self, frame: bytes, now_ms: int) -> SaslStep:
        try:
            header, position = _header(frame, ApiKey.SASL_HANDSHAKE)
            request = SaslHandshakeRequest.decode_prefix(frame, position, header.request_api_version)[0]
        except DecodeError as error:
            return self._fail(f"a valid SaslHandshake request was expected: {error}")
        self._has_requests = header.request_api_version >= _FIRST_VERSION_WITH_REQUESTS
        return self._shake_hands(header, request.mechanism, now_ms)

    def _receive_token(self, frame: bytes, now_ms: int) -> SaslStep:
        if frame[:2] == _VERSIONS_KEY:
            return self._refuse_versions(frame)
        try:
            header, position = _header(frame, ApiKey.SASL_AUTHENTICATE)
            request = SaslAuthenticateRequest.decode_prefix(frame, position, header.request_api_version)[0]
        except DecodeError as error:
            return self._fail(f"a valid SaslAuthenticate request was expected: {error}")
        return self._authenticate(header, request.auth_bytes, now_ms)

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

    # --- for subclasses -----------------------------------------------------------------------------------------------

    def _end_session_at(self, end_ms: int | None, principal: str) -> None:
        """Completes the authentication. The session ends at `end_ms`, or never."""
        self.principal = principal
        self.session_end_ms = end_ms
        self._state = LoginState.COMPLETE

    def _changed_principal(self, principal: str) -> str | None:
        """Returns Kafka's text if a re-authentication would change the principal, None if it would not."""
        if self.principal in (None, principal):
            return None
        old, new = str(self.principal).replace(":", ".", 1), principal.replace(":", ".", 1)
        return f"Cannot change principals during re-authentication from {old}: {new}"

    def _fail(self, reason: str, output: bytes = b"", *, is_delayed: bool = False) -> SaslStep:
        self._state = LoginState.FAILED
        return SaslStep(output, reason, self.failure_delay_ms if is_delayed else 0)


def handshake_answer(header: RequestHeader, error: Errors, mechanisms: list[str]) -> bytes:
    """Returns the framed response to a SaslHandshake."""
    return _framed(header, SaslHandshakeResponse(error_code=error, mechanisms=mechanisms))


def token_answer(header: RequestHeader | None, token: bytes, lifetime_ms: int) -> bytes:
    """Returns the framed answer to a token: a response, or the server's token alone if there was no request."""
    if header is None:
        return len(token).to_bytes(LENGTH_BYTES) + token
    return _framed(header, SaslAuthenticateResponse(auth_bytes=token, session_lifetime_ms=lifetime_ms))


def token_rejection(header: RequestHeader | None, text: str | None) -> bytes:
    """Returns the framed error response to a token, empty if there was no request, since nothing could carry it."""
    if header is None:
        return b""
    return _framed(header, SaslAuthenticateResponse(error_code=Errors.SASL_AUTHENTICATION_FAILED, error_message=text))


def _header(frame: bytes, key: ApiKey) -> tuple[RequestHeader, int]:
    """Returns the header of a request and the position of its body; raises DecodeError if it is not of this API."""
    header, position = decode_request_header(frame)
    if header.request_api_key != key or header.request_api_version not in _VERSIONS[key]:
        raise DecodeError(f"api key {header.request_api_key} v{header.request_api_version} is not allowed here")
    return header, position


def _framed(header: RequestHeader, response: SaslHandshakeResponse | SaslAuthenticateResponse) -> bytes:
    version = header.request_api_version
    return encode_response(header.correlation_id, header.request_api_key, version, response.encode(version))
