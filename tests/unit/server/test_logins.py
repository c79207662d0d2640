# SPDX-License-Identifier: Apache-2.0
"""The SASL settings of a listener: its keys, what is refused, and what changes while the broker runs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from joserfc.jwk import RSAKey

from kcoord.config import BrokerConfig, ConfigError
from kcoord.metadata.image import ScramCredential
from kcoord.security.jaas import BEARER_MODULE, PLAIN_MODULE, SCRAM_MODULE
from kcoord.security.oauthbearer import TokenRules
from kcoord.security.scram import Decoys
from kcoord.server.logins import ListenerLogins
from tests.unit.server.test_jwks import DOCUMENT

JAAS = "listener.name.users.plain.sasl.jaas.config"
SASL = {
    "listeners": "USERS://:9092",
    "listener.security.protocol.map": "USERS:SASL_PLAINTEXT",
    "sasl.enabled.mechanisms": "SCRAM-SHA-256,PLAIN",
    JAAS: f'{PLAIN_MODULE} required username="broker" password="own" user_alice="secret";',
}


def nobody(mechanism: str, user: str) -> ScramCredential | None:
    return None


def logins(config: BrokerConfig) -> ListenerLogins:
    return ListenerLogins(config, config.open_listeners[0], nobody, lambda: Decoys(b"key", {}))


def test_the_settings_of_a_listener() -> None:
    keys = {
        "sasl.server.max.receive.size": "1000",
        "listener.name.users.sasl.server.max.receive.size": "2000",
        "connections.max.reauth.ms": "3",
        "listener.name.users.plain.connections.max.reauth.ms": "4",
        "connection.failed.authentication.delay.ms": "5",
    }
    settings = logins(BrokerConfig.from_properties(SASL | keys)).settings()
    assert settings.mechanisms == ["SCRAM-SHA-256", "PLAIN"]
    assert settings.users.is_password("alice", "secret")
    assert not settings.users.is_password("broker", "own"), "the broker's own login is no user"
    assert settings.max_reauth_ms == {"SCRAM-SHA-256": 3, "PLAIN": 4}
    assert (settings.max_token_bytes, settings.failure_delay_ms, settings.decoys.key) == (2000, 5, b"key")
    nonces = {settings.new_nonce() for _ in range(10)}
    assert len(nonces) == 10 and all(len(nonce) == 24 for nonce in nonces)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (None, "PLAIN has no users; set it to org.apache.kafka.common.security.plain.PlainLoginModule required user_"),
        (f'{PLAIN_MODULE} required username="a" password="secret";', "PLAIN has no users"),
        (f'{PLAIN_MODULE} required user_alice="";', "empty name or an empty password"),
        (f'{PLAIN_MODULE} required user_="secret";', "empty name or an empty password"),
        (f'{SCRAM_MODULE} required user_alice="secret";', f"the login module must be {PLAIN_MODULE}"),
        (f'{PLAIN_MODULE} required user_alice="secret"', "must end with a semicolon"),
    ],
)
def test_a_line_that_names_no_users_is_refused(line: str | None, problem: str) -> None:
    properties = {key: value for key, value in SASL.items() if key != JAAS}
    # Lines without listener and mechanism do not count, as in Kafka.
    properties |= {"sasl.jaas.config": SASL[JAAS], "listener.name.users.sasl.jaas.config": SASL[JAAS]}
    if line is not None:
        properties[JAAS] = line
    shown = "None" if line is None else r"\[hidden\]"
    with pytest.raises(ConfigError, match=f"Invalid value {shown} for configuration {JAAS}: .*{problem}") as caught:
        logins(BrokerConfig.from_properties(properties))
    assert "secret" not in str(caught.value)


def test_a_line_of_scram_is_checked_too() -> None:
    key = "listener.name.users.scram-sha-256.sasl.jaas.config"
    logins(BrokerConfig.from_properties(SASL | {key: f"{SCRAM_MODULE} required;"}))
    with pytest.raises(ConfigError, match=f"{key}: the login module must be {SCRAM_MODULE}"):
        logins(BrokerConfig.from_properties(SASL | {key: SASL[JAAS]}))


def test_a_dynamic_config_changes_the_users(caplog: pytest.LogCaptureFixture) -> None:
    config = BrokerConfig.from_properties(SASL)
    listener = logins(config)
    assert listener.settings().users.is_password("alice", "secret")
    config.apply_dynamic({JAAS: f'{PLAIN_MODULE} required user_bob="new";'})
    users = listener.settings().users
    assert users.is_password("bob", "new") and not users.is_password("alice", "secret")
    with caplog.at_level(logging.ERROR):
        config.apply_dynamic({JAAS: "secret"})
        assert listener.settings().users.is_password("bob", "new")
    assert "Listener USERS keeps its users: Invalid value [hidden] for" in caplog.text
    with pytest.raises(ConfigError, match="hidden"):
        listener.check(config.with_dynamic({JAAS: "secret"}))
    with pytest.raises(ConfigError, match="hidden"):
        listener.begin()
    config.apply_dynamic({})
    listener.begin()
    assert listener.settings().users.is_password("alice", "secret")


# --- OAUTHBEARER ------------------------------------------------------------------------------------------------------

BEARER = "sasl.oauthbearer."
ALLOWED = "org.apache.kafka.sasl.oauthbearer.allowed."


@pytest.fixture
def bearer(tmp_path: Path) -> dict[str, str]:
    """The settings of a listener with OAUTHBEARER whose keys are in a file."""
    keys = tmp_path / "keys.json"
    keys.write_bytes(DOCUMENT)
    return SASL | {
        "sasl.enabled.mechanisms": "OAUTHBEARER",
        f"{BEARER}jwks.endpoint.url": keys.as_uri(),
        f"{BEARER}expected.audience": "kafka,other",
        f"{BEARER}expected.issuer": "https://issuer",
        f"{ALLOWED}files": str(keys),
    }


def test_the_settings_of_oauthbearer(bearer: dict[str, str]) -> None:
    names = {
        f"{BEARER}clock.skew.seconds": "5",
        f"{BEARER}scope.claim.name": "scp",
        f"listener.name.users.oauthbearer.{BEARER}sub.claim.name": "client",
        "listener.name.users.oauthbearer.sasl.jaas.config": f"{BEARER_MODULE} required;",
        "listener.name.users.oauthbearer.sasl.server.callback.handler.class": (
            "org.apache.kafka.common.security.oauthbearer.OAuthBearerValidatorCallbackHandler"
        ),
    }
    settings = logins(BrokerConfig.from_properties(bearer | names)).settings().bearer
    assert settings is not None
    assert settings.rules == TokenRules(["kafka", "other"], "https://issuer", 5, "scp", "client")
    assert isinstance(settings.keys().key("r", "RS256"), RSAKey)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({f"{BEARER}expected.audience": None}, "tokens of any audience would be accepted; set it, or set .*=true"),
        ({f"{BEARER}expected.issuer": None}, "tokens of any issuer would be accepted"),
        ({f"{BEARER}jwks.endpoint.url": None}, "OAUTHBEARER needs the keys"),
        ({f"{BEARER}jwks.endpoint.url": "http://issuer/keys"}, "its scheme must be https or file"),
        ({f"{BEARER}jwks.endpoint.url": "https://issuer/keys"}, f"is not allowed. Update {ALLOWED}urls to allow it"),
        ({f"{ALLOWED}files": None}, f"is not allowed. Update {ALLOWED}files to allow it"),
        (
            {f"{BEARER}jwks.endpoint.url": "file:///nowhere", f"{ALLOWED}urls": "file:///nowhere"},
            "file:///nowhere for configuration sasl.oauthbearer.jwks.endpoint.url: .*No such file",
        ),
        (
            {
                "listener.name.users.oauthbearer.sasl.jaas.config": (
                    f'{BEARER_MODULE} required unsecuredLoginStringClaim_sub="admin";'
                )
            },
            "unsecured tokens are not accepted",
        ),
        ({"listener.name.users.oauthbearer.sasl.jaas.config": f"{PLAIN_MODULE} required;"}, "must be .*OAuthBearer"),
    ],
)
def test_oauthbearer_that_is_not_safe_is_refused(
    bearer: dict[str, str], changes: dict[str, str | None], problem: str
) -> None:
    changed = bearer | changes
    properties = {name: value for name, value in changed.items() if value is not None}
    with pytest.raises(ConfigError, match=problem):
        logins(BrokerConfig.from_properties(properties))


def test_any_audience_and_issuer_must_be_asked_for_in_4_4(bearer: dict[str, str]) -> None:
    for name in ("audience", "issuer"):
        del bearer[f"{BEARER}expected.{name}"]
    allowed = {f"{BEARER}allow.unverified.{name}": "true" for name in ("audience", "issuer")}
    for properties in (bearer | allowed, bearer | {"kcoord.release": "4.3"}):
        settings = logins(BrokerConfig.from_properties(properties)).settings().bearer
        assert settings is not None and settings.rules == TokenRules([])


def test_oauthbearer_cannot_be_added_while_the_broker_runs() -> None:
    config = BrokerConfig.from_properties(SASL)
    listener = logins(config)
    changed = config.with_dynamic({"listener.name.users.sasl.enabled.mechanisms": "PLAIN,OAUTHBEARER"})
    with pytest.raises(ConfigError, match="OAUTHBEARER can be added only by a restart"):
        listener.check(changed)
