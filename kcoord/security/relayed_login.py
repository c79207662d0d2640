# SPDX-License-Identifier: Apache-2.0
"""A login that another broker decides, to which the client's messages are passed on. Pure.

Theory of operation. `kcoord.security.login_states` has the states. `receive` takes a SaslHandshake or a token. If it is
sound, `take_request` returns the request for the other broker, and the state is RELAYING. `answered` takes the response
and returns the answer for the client: the login goes on, is complete, or has failed. The other broker gets
SaslAuthenticate requests also for a client that sends bare tokens.

The principal is the user that the other broker has accepted. The client names it in its first message, and the other
broker checks it:

* PLAIN: the user name. The broker checks the password.
* SCRAM: the user name. The client's proof is for this name. A delegation token is refused, because its owner is known
  to the other broker only.
* OAUTHBEARER: the subject of the token, whose signature the broker checks.

A client may ask for an authorization id beside its name. Kafka refuses another one than the name. A broker that ignores
it must not give the client another principal, so it is refused here. If the broker accepts a login in whose messages no
user was found, the login fails: it is never complete without a principal.

A login is complete if the broker has answered the last message of the mechanism without an error: the only one of
PLAIN, the second one of SCRAM, and for OAUTHBEARER a message with an empty answer. A broker answers a token that it
does not accept with a message that is not empty, and with an error after that (RFC 7628).
"""

from __future__ import annotations

import binascii
import json
from base64 import urlsafe_b64decode
from typing import Final

from kcoord.security.login_states import (
    LoginState,
    LoginStates,
    SaslStep,
    handshake_answer,
    token_answer,
    token_rejection,
)
from kcoord.security.plain import parse_plain
from kcoord.security.rejection import OTHER_AUTHORIZATION_ID, Rejection
from kcoord.security.scram import claimed_user
from kcoord.security.scram_messages import HASHES
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import (
    RequestHeader,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

PLAIN: Final = "PLAIN"
OAUTHBEARER: Final = "OAUTHBEARER"
RELAYED_MECHANISMS: Final = (PLAIN, *HASHES, OAUTHBEARER)
"""The mechanisms whose messages name the user."""
_TOKEN_LOGIN: Final = "Delegation tokens cannot be used here, because their owners are not known."
_SCRAM_MESSAGES: Final = 2
_JWT_PARTS: Final = 3


class RelayedLogin(LoginStates):
    """The login of one connection; the module describes it. `subject_claim`: the claim that names a token's user."""

    def __init__(self, max_token_bytes: int, failure_delay_ms: int, subject_claim: str) -> None:
        super().__init__()
        self._max_token_bytes = max_token_bytes
        self._failure_delay_ms = failure_delay_ms
        self._subject_claim = subject_claim
        self._request: SaslHandshakeRequest | SaslAuthenticateRequest | None = None
        self._header: RequestHeader | None = None
        """The header of the client's request that is being answered."""
        self._messages = 0
        """Number of messages of the client in this exchange."""
        self._user = ""
        """The user that the client has named in this exchange; empty if none was found."""

    @property
    def max_token_bytes(self) -> int:
        """The largest frame that is passed on."""
        return self._max_token_bytes

    @property
    def failure_delay_ms(self) -> int:
        """The time after which a client learns of a failure that is found here. The other broker has a delay itself."""
        return self._failure_delay_ms

    def take_request(self) -> SaslHandshakeRequest | SaslAuthenticateRequest | None:
        """Removes and returns the request for the other broker, None if there is none."""
        request, self._request = self._request, None
        return request

    def _shake_hands(self, header: RequestHeader, mechanism: str, now_ms: int) -> SaslStep:
        self.mechanism = mechanism
        self._messages, self._user = 0, ""
        return self._relay(header, SaslHandshakeRequest(mechanism=mechanism))

    def _authenticate(self, header: RequestHeader | None, token: bytes, now_ms: int) -> SaslStep:
        self._messages += 1
        if self._messages == 1:
            try:
                self._user = _claimed_user(self.mechanism, token, self._subject_claim)
            except Rejection as error:
                return self._reject(header, str(error), error.client_text)
        return self._relay(header, SaslAuthenticateRequest(auth_bytes=token))

    def _relay(self, header: RequestHeader | None, request: SaslHandshakeRequest | SaslAuthenticateRequest) -> SaslStep:
        self._header, self._request = header, request
        self._state = LoginState.RELAYING
        return SaslStep()

    # --- answers of the other broker ----------------------------------------------------------------------------------

    def answered(self, response: SaslHandshakeResponse | SaslAuthenticateResponse, now_ms: int) -> SaslStep:
        """Returns the answer to the client's last frame."""
        is_handshake = self._messages == 0
        if self._state is not LoginState.RELAYING or isinstance(response, SaslHandshakeResponse) is not is_handshake:
            return self._fail("a response came that nothing waits for")
        self._state = LoginState.AUTHENTICATE
        if isinstance(response, SaslHandshakeResponse):
            return self._hands_shaken(response)
        header = self._header
        if response.error_code:
            # The other broker has delayed its response, and its text is for clients.
            output = token_rejection(header, response.error_message)
            return self._fail(f"the authentication with {self.mechanism} was refused", output)
        if not self._is_last(response):
            return SaslStep(token_answer(header, response.auth_bytes, 0))
        if not self._user:
            return self._reject(header, "the messages of the client have no user name that can be read", None)
        principal = f"User:{self._user}"
        changed = self._changed_principal(principal)
        if changed is not None:
            return self._reject(header, "the client cannot change its principal during re-authentication", changed)
        lifetime_ms = response.session_lifetime_ms
        self._end_session_at(now_ms + lifetime_ms if lifetime_ms > 0 else None, principal)
        return SaslStep(token_answer(header, response.auth_bytes, lifetime_ms))

    def _hands_shaken(self, response: SaslHandshakeResponse) -> SaslStep:
        assert self._header is not None, "a handshake has a request"
        mechanisms = [mechanism for mechanism in response.mechanisms if mechanism in RELAYED_MECHANISMS]
        is_offered = not response.error_code and self.mechanism in RELAYED_MECHANISMS
        error = Errors.NONE if is_offered else Errors.UNSUPPORTED_SASL_MECHANISM
        output = handshake_answer(self._header, error, mechanisms)
        if not is_offered:
            return self._fail("the client asks for a SASL mechanism that cannot be passed on", output)
        return SaslStep(output)

    def _is_last(self, response: SaslAuthenticateResponse) -> bool:
        """Returns whether this response without an error accepts the client."""
        if self.mechanism == PLAIN:
            return True
        if self.mechanism == OAUTHBEARER:
            return not response.auth_bytes
        return self._messages == _SCRAM_MESSAGES

    def _reject(self, header: RequestHeader | None, reason: str, client_text: str | None) -> SaslStep:
        text = client_text or f"Authentication failed with SASL mechanism {self.mechanism}: {reason}"
        reason = f"the authentication with {self.mechanism} failed: {reason}"
        return self._fail(reason, token_rejection(header, text), is_delayed=True)


def _claimed_user(mechanism: str, message: bytes, subject_claim: str) -> str:
    """Returns the user that the client names in its first message, empty if there is none.

    The other broker refuses a message that is malformed. Raises Rejection for a message that it might accept, but that
    would log in another principal.
    """
    if mechanism == OAUTHBEARER:
        return _claimed_subject(message, subject_claim)
    is_token = False
    try:
        if mechanism == PLAIN:
            authorization_id, user, _ = parse_plain(message)
        else:
            authorization_id, user, is_token = claimed_user(message)
    except Rejection:
        return ""
    if is_token:
        raise Rejection(_TOKEN_LOGIN, _TOKEN_LOGIN)
    if authorization_id not in ("", user):
        raise Rejection("the client asks for another authorization id", OTHER_AUTHORIZATION_ID)
    return user


def _claimed_subject(message: bytes, claim: str) -> str:
    # Most logins do not load what tokens need.
    from kcoord.security.oauthbearer import TokenError, parse_message

    try:
        parsed = parse_message(message)
    except TokenError:
        return ""
    subject = subject_of(parsed.token, claim)
    if parsed.authorization_id not in ("", subject):
        raise Rejection("the client asks for another authorization id", OTHER_AUTHORIZATION_ID)
    return subject


def subject_of(token: str, claim: str) -> str:
    """Returns a claim of a JSON Web Token without checking its signature, empty if it has no such text."""
    parts = token.split(".")
    if len(parts) != _JWT_PARTS:
        return ""
    try:
        claims = json.loads(urlsafe_b64decode(parts[1] + "=" * (-len(parts[1]) % 4)))
    except (binascii.Error, ValueError, RecursionError):
        return ""
    subject = claims.get(claim) if isinstance(claims, dict) else None
    return subject if isinstance(subject, str) else ""
