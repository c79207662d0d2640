# SPDX-License-Identifier: Apache-2.0
"""The authentication of one connection by SASL, by the users and keys that the broker itself knows. Pure.

`kcoord.security.login_states` has the states. In the state AUTHENTICATE the mechanism answers each token, and in the
end accepts or refuses the client.

A session has an end if `connections.max.reauth.ms` is set, or if the credential has one: a token of OAUTHBEARER, or a
delegation token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kcoord.security.login_states import (
    LoginState,
    LoginStates,
    SaslStep,
    handshake_answer,
    token_answer,
    token_rejection,
)
from kcoord.security.plain import PlainExchange, PlainUsers
from kcoord.security.rejection import Rejection
from kcoord.security.scram import CredentialLookup, Decoys, ScramServerExchange, TokenLogin
from kcoord.security.scram_messages import ScramError
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import RequestHeader

if TYPE_CHECKING:
    from kcoord.security.oauthbearer import BearerExchange, BearerSettings

PLAIN: Final = "PLAIN"
OAUTHBEARER: Final = "OAUTHBEARER"


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


class SaslAuthenticator(LoginStates):
    """The authentication of one connection.

    `settings` returns the settings of the listener. They are asked for at each handshake, since they may change.
    """

    def __init__(self, settings: Callable[[], SaslSettings]) -> None:
        super().__init__()
        self._current_settings = settings
        self._settings = settings()
        self._exchange: PlainExchange | ScramServerExchange | BearerExchange | None = None

    @property
    def max_token_bytes(self) -> int:
        """The largest frame that the listener accepts during a login."""
        return self._settings.max_token_bytes

    @property
    def failure_delay_ms(self) -> int:
        """The time after which a client of the listener learns that its authentication has failed."""
        return self._settings.failure_delay_ms

    # --- the handshake ------------------------------------------------------------------------------------------------

    def _shake_hands(self, header: RequestHeader, mechanism: str, now_ms: int) -> SaslStep:
        settings = self._settings = self._current_settings()
        is_offered = mechanism in settings.mechanisms
        error = Errors.NONE if is_offered else Errors.UNSUPPORTED_SASL_MECHANISM
        output = handshake_answer(header, error, list(settings.mechanisms))
        if not is_offered:
            return self._fail("the client asks for a SASL mechanism that is not enabled", output, is_delayed=True)
        self.mechanism = mechanism
        self._exchange = self._new_exchange(now_ms)
        self._state = LoginState.AUTHENTICATE
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

    def _authenticate(self, header: RequestHeader | None, token: bytes, now_ms: int) -> SaslStep:
        try:
            answer = self._respond(token)
        except (Rejection, ScramError) as error:
            output = token_rejection(header, self._client_text(error))
            return self._fail(f"the authentication with {self.mechanism} failed: {error}", output, is_delayed=True)
        lifetime_ms = self._complete(now_ms) if self._is_accepted else 0
        return SaslStep(token_answer(header, answer, lifetime_ms))

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
        changed = self._changed_principal(f"User:{exchange.user}") if exchange.is_complete else None
        if changed is not None:
            raise Rejection("the client cannot change its principal during re-authentication", changed)
        return answer

    def _complete(self, now_ms: int) -> int:
        """Begins the session and returns its length, 0 if it has no end."""
        exchange = self._exchange
        assert exchange is not None
        self._exchange = None
        self.is_token_authenticated = isinstance(exchange, ScramServerExchange) and exchange.is_token_login
        max_reauth_ms = self._settings.max_reauth_ms.get(self.mechanism, 0)
        lifetimes_ms = [max_reauth_ms] if max_reauth_ms > 0 else []
        if exchange.credential_end_ms is not None:
            lifetimes_ms.append(max(exchange.credential_end_ms - now_ms, 0))
        lifetime_ms = min(lifetimes_ms, default=0)
        self._end_session_at(now_ms + lifetime_ms if lifetimes_ms else None, f"User:{exchange.user}")
        return lifetime_ms

    # --- failures -----------------------------------------------------------------------------------------------------

    def _client_text(self, error: Rejection | ScramError) -> str:
        if isinstance(error, Rejection) and error.client_text is not None:
            return error.client_text
        phase = "authentication" if self._previous_mechanism is None else "re-authentication"
        return f"Authentication failed during {phase} due to invalid credentials with SASL mechanism {self.mechanism}"

    def _fail(self, reason: str, output: bytes = b"", *, is_delayed: bool = False) -> SaslStep:
        self._exchange = None
        return super()._fail(reason, output, is_delayed=is_delayed)
