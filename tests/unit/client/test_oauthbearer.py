# SPDX-License-Identifier: Apache-2.0
"""The client's side of OAUTHBEARER: when tokens are requested, the messages, and which settings are rejected."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest

from kcoord.client import ConfigException, Errors, KafkaError
from kcoord.client.oauthbearer import (
    ALLOWED_FILES,
    ALLOWED_URLS,
    BearerLogin,
    RefreshRules,
    Token,
    bearer_login_of,
    parse_token,
)
from kcoord.client.token_endpoint import TokenRequestError, read_token_file
from kcoord.security.jaas import BEARER_MODULE, LoginModule
from kcoord.security.oauthbearer import parse_message
from tests.unit.client.virtual_loop import now_ms

NOW_MS = 1_800_000_000_000
MINUTE_MS = 60_000
URL = "https://issuer.example/token"
CREDENTIALS = {
    "sasl.oauthbearer.token.endpoint.url": URL,
    "sasl.oauthbearer.client.credentials.client.id": "alice",
    "sasl.oauthbearer.client.credentials.client.secret": "apple-pie",
}


def jwt(**claims: object) -> str:
    parts = [json.dumps(part).encode() for part in ({"alg": "RS256"}, claims)]
    return ".".join(base64.urlsafe_b64encode(part).rstrip(b"=").decode() for part in (*parts, b"signature"))


class Provider:
    """An identity provider whose tokens live ten minutes, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now_ms = NOW_MS
        self.failures: list[TokenRequestError] = []
        self.requested_ms: list[float] = []

    def __call__(self) -> str:
        self.requested_ms.append(now_ms())
        if self.failures:
            raise self.failures.pop(0)
        return jwt(iat=self.now_ms // 1000, exp=self.now_ms // 1000 + 600, number=len(self.requested_ms))

    def login(self, **extensions: str) -> BearerLogin:
        return BearerLogin(self, extensions, RefreshRules(), lambda: self.now_ms, lambda: 0.5)


class Broker:
    """Accepts tokens, or refuses them as a broker does."""

    def __init__(self, *, refuses: bool = False) -> None:
        self.heard: list[bytes] = []
        self._refuses = refuses

    async def send(self, message: bytes) -> bytes:
        self.heard.append(message)
        if self._refuses and message == b"\x01":
            raise KafkaError(Errors.SASL_AUTHENTICATION_FAILED, '{"status":"invalid_token"}')
        return b'{"status":"invalid_token"}' if self._refuses else b""


@pytest.fixture(autouse=True)
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(function: Callable[[], str]) -> str:
        return function()

    monkeypatch.setattr("asyncio.to_thread", at_once)


@pytest.mark.parametrize(
    ("start_ms", "life_ms", "chance", "refresh_ms"),
    [
        (0, 60 * MINUTE_MS, 0.0, 48 * MINUTE_MS),
        (0, 60 * MINUTE_MS, 1.0, 51 * MINUTE_MS),
        # The last five minutes stay free.
        (0, 20 * MINUTE_MS, 0.0, 15 * MINUTE_MS),
        # A token that came late in its life is kept for a minute.
        (-30 * MINUTE_MS, 6 * MINUTE_MS, 0.0, MINUTE_MS),
        # A short token has no room for both.
        (0, 5 * MINUTE_MS, 0.0, 4 * MINUTE_MS),
        (-5 * MINUTE_MS, 5 * MINUTE_MS, 0.0, 4 * MINUTE_MS),
    ],
)
def test_the_refresh_time_is_kafkas(start_ms: int, life_ms: int, chance: float, refresh_ms: int) -> None:
    token = Token("t", NOW_MS + start_ms, NOW_MS + life_ms)
    assert RefreshRules().refresh_ms(token, NOW_MS, chance) == NOW_MS + refresh_ms


def test_the_times_of_a_token() -> None:
    seconds = NOW_MS // 1000
    text = jwt(iat=seconds - 5, exp=seconds + 0.5)
    assert parse_token(text, NOW_MS) == Token(text, NOW_MS - 5000, NOW_MS + 500)
    assert parse_token(jwt(exp=seconds + 1), NOW_MS).start_ms == NOW_MS
    assert "apple" not in repr(Token("apple", 1, 2))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("opaque", "not a signed JSON Web Token"),
        ("ü.ü.ü", "not a signed JSON Web Token"),
        ("a.b.c", "not a signed JSON Web Token"),
        (jwt(), "the claim exp"),
        (jwt(exp=True), "the claim exp"),
        (jwt(exp="1"), "the claim exp"),
        (jwt(exp=1e300), "the claim exp"),
        (jwt(exp=NOW_MS // 1000), "has expired"),
    ],
)
def test_tokens_that_a_client_does_not_send(text: str, problem: str) -> None:
    with pytest.raises(TokenRequestError, match=problem) as raised:
        parse_token(text, NOW_MS)
    assert text not in str(raised.value) and not raised.value.is_retriable


class TestLogin:
    async def test_the_message_is_the_one_that_brokers_parse(self) -> None:
        broker = Broker()
        await Provider().login(traceId="1 2", tenant="x").log_in(broker.send)
        parsed = parse_message(broker.heard[0])
        assert parsed.token.count(".") == 2
        assert (parsed.authorization_id, parsed.extensions) == ("", {"traceId": "1 2", "tenant": "x"})

    async def test_one_token_for_many_connections_until_its_refresh_time(self) -> None:
        provider, broker = Provider(), Broker()
        login = provider.login()
        for after_ms, requests in ((0, 1), (299_999, 1), (1, 2), (0, 2)):
            provider.now_ms += after_ms
            await login.log_in(broker.send)
            assert len(provider.requested_ms) == requests, "10 minutes without the last 5 are 5 minutes"
        assert broker.heard[0] == broker.heard[1] != broker.heard[2] == broker.heard[3]

    async def test_an_unreachable_provider_does_not_end_a_token(self, caplog: pytest.LogCaptureFixture) -> None:
        provider, broker = Provider(), Broker()
        login = provider.login()
        await login.log_in(broker.send)
        provider.failures = [TokenRequestError("no route", is_retriable=True)] * 1000
        for after_ms, requests in ((400_000, 2), (9_999, 2), (1, 3), (189_999, 4)):
            provider.now_ms += after_ms
            await login.log_in(broker.send)
            assert len(provider.requested_ms) == requests
        assert len(set(broker.heard)) == 1
        assert "the old one stays in use until its end: no route" in caplog.text
        provider.now_ms += 1
        with pytest.raises(KafkaError, match="SASL_AUTHENTICATION_FAILED: there is no token: no route"):
            await login.log_in(broker.send)
        provider.failures.clear()
        await login.log_in(broker.send)

    async def test_the_first_request_is_repeated_with_a_growing_delay(self) -> None:
        provider = Provider()
        provider.failures = [TokenRequestError("no route", is_retriable=True)] * 1000
        began_ms = now_ms()
        with pytest.raises(KafkaError, match="no route"):
            await provider.login().log_in(Broker().send)
        waits = [round(later - earlier) for earlier, later in pairwise(provider.requested_ms)]
        assert waits == [100, 200, 400, 800, 1600, 3200, 3700]
        assert now_ms() - began_ms == pytest.approx(10_000)

    async def test_a_refused_client_does_not_ask_again(self) -> None:
        provider = Provider()
        provider.failures = [TokenRequestError("status 401", is_retriable=False)]
        login = provider.login()
        with pytest.raises(KafkaError, match="status 401"):
            await login.log_in(Broker().send)
        assert len(provider.requested_ms) == 1

    async def test_a_token_that_the_broker_refuses_is_not_used_again(self) -> None:
        provider, broker = Provider(), Broker(refuses=True)
        login = provider.login()
        for _ in range(2):
            with pytest.raises(KafkaError, match=r'SASL_AUTHENTICATION_FAILED: \{"status":"invalid_token"\}'):
                await login.log_in(broker.send)
        assert broker.heard[1] == broker.heard[3] == b"\x01"
        assert broker.heard[0] != broker.heard[2] and len(provider.requested_ms) == 2


class TestProperties:
    def login(self, jaas: dict[str, str] | None = None, allowed: str = URL, **changes: str) -> BearerLogin:
        properties = CREDENTIALS | {key.replace("_", "."): text for key, text in changes.items()}
        return bearer_login_of(properties, LoginModule(BEARER_MODULE, jaas or {}), {ALLOWED_URLS: allowed})

    def test_the_keys_and_the_older_options_of_the_login_module(self) -> None:
        self.login()
        without = {key.replace(".", "_"): "" for key in CREDENTIALS if "client" in key}
        self.login({"clientId": "alice", "clientSecret": "apple-pie"}, **without)
        with pytest.raises(ConfigException, match=r"sasl\.oauthbearer\.client\.credentials\.client\.id"):
            self.login({"clientSecret": "apple-pie"}, **without)
        with pytest.raises(ConfigException, match=r"sasl\.oauthbearer\.client\.credentials\.client\.secret"):
            self.login({"clientId": "alice"}, **without)

    @pytest.mark.parametrize("allowed", ["", f"{URL}s", "https://issuer.example", "*"])
    def test_an_address_must_be_allowed_outside_of_the_properties(self, allowed: str) -> None:
        with pytest.raises(ConfigException, match=f"{URL} is not allowed; add {URL} to .* {ALLOWED_URLS}"):
            self.login(allowed=allowed)
        with pytest.raises(ConfigException, match="is not allowed"):
            self.login(allowed=allowed, org_apache_kafka_sasl_oauthbearer_allowed_urls=URL)

    def test_a_file_must_be_allowed(self, tmp_path: Path) -> None:
        file = tmp_path / "token"
        file.write_text(f" {jwt(exp=1)}\n")
        properties = {"sasl.oauthbearer.token.endpoint.url": file.as_uri()}
        module = LoginModule(BEARER_MODULE, {})
        with pytest.raises(ConfigException, match=f"add {file} to the environment variable {ALLOWED_FILES}"):
            bearer_login_of(properties, module, {ALLOWED_FILES: str(tmp_path)})
        bearer_login_of(properties, module, {ALLOWED_FILES: f"/other, {file}"})
        bearer_login_of(properties, module, {ALLOWED_URLS: file.as_uri()})
        assert read_token_file(file.as_uri()) == jwt(exp=1)
        file.write_text(" ")
        with pytest.raises(TokenRequestError, match="the file is empty"):
            read_token_file(file.as_uri())
        with pytest.raises(TokenRequestError, match="No such file"):
            read_token_file(f"{file.as_uri()}s")

    @pytest.mark.parametrize(
        "url",
        [
            "http://issuer.example/token",
            "ftp://x/y",
            "",
            "https://",
            "https://a:pie@x/y",
            "https://x:port/y",
            "https://[x/y",
            "https://x/ü",
        ],
    )
    def test_only_https_and_files(self, url: str) -> None:
        with pytest.raises(ConfigException, match="must be an https or file address") as raised:
            self.login(allowed=url, sasl_oauthbearer_token_endpoint_url=url)
        assert "pie" not in str(raised.value)

    @pytest.mark.parametrize(
        ("key", "text", "problem"),
        [
            ("sasl.login.refresh.window.factor", "0.4", "is not between 0.5 and 1.0"),
            ("sasl.login.refresh.window.jitter", "0.3", "is not between 0.0 and 0.25"),
            ("sasl.login.refresh.min.period.seconds", "901", "is not between 0 and 900"),
            ("sasl.login.refresh.buffer.seconds", "3601", "is not between 0 and 3600"),
            ("sasl.login.retry.backoff.ms", "-1", "is not between"),
            ("sasl.login.read.timeout.ms", "x", "is not a number"),
            ("sasl.login.connect.timeout.ms", "nan", "is not between"),
            ("sasl.oauthbearer.header.urlencode", "x", "neither true nor false"),
            ("sasl.login.callback.handler.class", "com.example.Mine", "is not one of"),
            ("sasl.oauthbearer.jwt.retriever.class", "JwtBearerJwtRetriever", "is not one of"),
        ],
    )
    def test_invalid_values(self, key: str, text: str, problem: str) -> None:
        with pytest.raises(ConfigException, match=problem) as raised:
            self.login(None, **{key.replace(".", "_"): text})
        assert key in str(raised.value)

    @pytest.mark.parametrize(
        ("options", "problem"),
        [
            ({"unsecuredLoginStringClaim_sub": "alice"}, "without options that begin with unsecured"),
            ({"extension_auth": "x"}, "Extension name auth is invalid"),
            ({"extension_a1": "x"}, "Extension name a1 is invalid"),
            ({"extension_a": "x\x01auth=Bearer y"}, "the value of the extension a is invalid"),
            ({"ssl.truststore.location": "/absent.pem", "ssl.truststore.type": "PEM"}, "No such file"),
        ],
    )
    def test_invalid_options(self, options: dict[str, str], problem: str) -> None:
        with pytest.raises(ConfigException, match=rf"sasl\.jaas\.config: .*{problem}"):
            self.login(options)

    def test_another_login_module(self) -> None:
        with pytest.raises(ConfigException, match=f"needs {BEARER_MODULE}"):
            bearer_login_of(CREDENTIALS, LoginModule("PlainLoginModule", {}), {ALLOWED_URLS: URL})
