# SPDX-License-Identifier: Apache-2.0
"""TLS and SASL from Kafka's properties: supported and rejected properties, and the computations of SCRAM."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest

from kcoord.client import AdminConfig, ConfigException, Errors, KafkaError
from kcoord.client.scram import MAX_ITERATIONS, ScramExchange
from kcoord.client.security import Response, Security
from kcoord.client.security_properties import PropertiesSecurity, security_of
from kcoord.security.scram_messages import MIN_ITERATIONS, ScramError
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

CERTIFICATE = Path(__file__).parents[2] / "integration" / "client" / "tls" / "localhost.pem"
TLS = {"security.protocol": "ssl", "ssl.truststore.type": "PEM", "ssl.truststore.location": str(CERTIFICATE)}
JAAS = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="me" password="a \\"word\\"";'
SASL = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.jaas.config": JAAS}


def test_the_scram_exchange_of_rfc_7677() -> None:
    exchange = ScramExchange("SCRAM-SHA-256", "user", "pencil", "rOprNGfwEbeRWgbNEkqO")
    assert exchange.first() == b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"
    nonce = "rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0"
    final = exchange.final(f"r={nonce},s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096".encode())
    assert final == f"c=biws,r={nonce},p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=".encode()
    exchange.verify(b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")
    with pytest.raises(ScramError, match="the server does not know the password"):
        exchange.verify(b"v=AAAATRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4=")
    with pytest.raises(ScramError, match="other-error"):
        exchange.verify(b"e=other-error")


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ("r=other,s=AAAA,i=4096", "did not extend the nonce"),
        ("r=mine,s=AAAA,i=4096", "did not extend the nonce"),
        ("r=mine1,s=AAAA,i=10", "10 iterations"),
        (f"r=mine1,s=AAAA,i={MAX_ITERATIONS + 1}", "iterations are not between"),
        ("r=mine1,s=A,i=4096", "not base64"),
        ("", "did not extend the nonce"),
    ],
)
def test_a_server_that_breaks_the_protocol_gets_no_proof(message: str, problem: str) -> None:
    with pytest.raises(ScramError, match=problem):
        ScramExchange("SCRAM-SHA-512", "user", "pencil", "mine").final(message.encode())


@pytest.mark.parametrize("iterations", [MIN_ITERATIONS, MAX_ITERATIONS])
def test_the_limits_of_iterations_are_allowed(iterations: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # A million iterations take a second.
    monkeypatch.setattr("hashlib.pbkdf2_hmac", lambda *_: b"salted")
    message = f"r=mine1,s=AAAA,i={iterations}"
    assert (
        ScramExchange("SCRAM-SHA-512", "user", "pencil", "mine").final(message.encode()).startswith(b"c=biws,r=mine1")
    )


class Script:
    """The broker's side of a login: scripted responses, and the messages that it received in `heard`."""

    def __init__(self, *answers: bytes | Errors, shake: Errors = Errors.NONE) -> None:
        self.heard: list[str | bytes] = []
        self._answers = list(answers)
        self._shake = shake

    async def call(self, request: Message, response: type[Response]) -> Response:
        answer: Message
        if isinstance(request, SaslHandshakeRequest):
            self.heard.append(request.mechanism)
            answer = SaslHandshakeResponse(error_code=self._shake, mechanisms=["A", "B"])
        else:
            assert isinstance(request, SaslAuthenticateRequest)
            self.heard.append(request.auth_bytes)
            next_answer = self._answers.pop(0)
            if isinstance(next_answer, Errors):
                answer = SaslAuthenticateResponse(error_code=next_answer, error_message="by script")
            else:
                answer = SaslAuthenticateResponse(auth_bytes=next_answer)
        assert isinstance(answer, response)
        return answer


def security(**properties: str) -> Security:
    configured = security_of(SASL | {name.replace("_", "."): text for name, text in properties.items()})
    assert configured is not None
    return configured


class TestLogin:
    NONCE = "rOprNGfwEbeRWgbNEkqO"
    FIRST = f"r={NONCE}%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096".encode()
    LAST = b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="

    async def test_plain_login(self) -> None:
        script = Script(b"")
        await security().authenticate(script)
        assert script.heard == ["PLAIN", b'\0me\0a "word"']

    async def test_a_rejected_login(self) -> None:
        with pytest.raises(KafkaError, match="SASL_AUTHENTICATION_FAILED: by script"):
            await security().authenticate(Script(Errors.SASL_AUTHENTICATION_FAILED))
        script = Script(shake=Errors.UNSUPPORTED_SASL_MECHANISM)
        with pytest.raises(
            KafkaError, match=r"UNSUPPORTED_SASL_MECHANISM: sasl\.mechanism=PLAIN: the broker offers A, B"
        ):
            await security().authenticate(script)
        assert script.heard == ["PLAIN"]

    async def test_scram_login_of_rfc_7677(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("secrets.token_urlsafe", lambda size: self.NONCE)
        scram = security(
            sasl_mechanism="SCRAM-SHA-256",
            sasl_jaas_config='ScramLoginModule required username="user" password="pencil";',
        )
        script = Script(self.FIRST, self.LAST)
        await scram.authenticate(script)
        assert script.heard[:2] == ["SCRAM-SHA-256", b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO"]
        assert bytes(script.heard[2]).endswith(b",p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ=")  # type: ignore[arg-type]
        with pytest.raises(KafkaError, match="SASL_AUTHENTICATION_FAILED: SCRAM-SHA-256: the server does not know"):
            await scram.authenticate(Script(self.FIRST, b"v=AAAA"))

    async def test_without_a_login_no_request_is_sent(self) -> None:
        script = Script()
        tls = security_of(TLS)
        assert tls is not None
        await tls.authenticate(script)
        assert script.heard == []

    @pytest.mark.parametrize("jaas", ['username="me"', 'password="word"', ""])
    def test_a_login_without_user_or_password_is_rejected(self, jaas: str) -> None:
        with pytest.raises(ConfigException, match=r"username=.* and password="):
            security(sasl_jaas_config=f"PlainLoginModule required {jaas};")


def test_user_names_are_escaped() -> None:
    assert ScramExchange("SCRAM-SHA-512", "a=b,c", "p", "n").first() == b"n,,n=a=3Db=2Cc,r=n"


def test_plaintext_has_no_security() -> None:
    assert security_of({}) is None
    assert security_of({"security.protocol": "plaintext"}) is None


def test_tls_settings() -> None:
    both = security_of(TLS | {"ssl.enabled.protocols": " TLSv1.3, TLSv1.2 "})
    assert isinstance(both, PropertiesSecurity)
    context = both.ssl_context()
    assert context is not None
    versions = context.minimum_version, context.maximum_version
    assert versions == (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3)
    security = security_of(TLS | {"ssl.enabled.protocols": "TLSv1.3"})
    assert security is not None
    context = security.ssl_context()
    assert context is not None
    assert (context.verify_mode, context.check_hostname) == (ssl.CERT_REQUIRED, True)
    assert context.minimum_version is ssl.TLSVersion.TLSv1_3
    assert context.cert_store_stats()["x509"] == 1
    lenient = security_of(TLS | {"ssl.endpoint.identification.algorithm": ""})
    assert lenient is not None
    unnamed = lenient.ssl_context()
    assert unnamed is not None
    assert (unnamed.verify_mode, unnamed.check_hostname) == (ssl.CERT_REQUIRED, False)
    with_key = security_of(TLS | {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(CERTIFICATE)})
    assert isinstance(with_key, PropertiesSecurity)


def test_certificates_in_the_properties_themselves() -> None:
    properties = {"security.protocol": "SSL", "ssl.truststore.type": "PEM"}
    security = security_of(properties | {"ssl.truststore.certificates": CERTIFICATE.read_text()})
    assert security is not None
    context = security.ssl_context()
    assert context is not None
    assert context.cert_store_stats()["x509"] == 1


def test_a_login_without_tls() -> None:
    security = security_of(SASL)
    assert security is not None
    assert security.ssl_context() is None


@pytest.mark.parametrize(
    ("properties", "problem"),
    [
        ({"security.protocol": "TLS"}, "'TLS' is not one of PLAINTEXT, SSL"),
        (TLS | {"ssl.truststore.type": "JKS"}, "the file is in PEM form; set ssl.truststore.type=PEM"),
        ({"security.protocol": "SSL", "ssl.truststore.location": "t.jks"}, "value t.jks for .*No such file"),
        (TLS | {"ssl.truststore.location": "/absent.pem"}, "/absent.pem for .*truststore.location: .*No such file"),
        (TLS | {"ssl.keystore.location": "k.p12", "ssl.keystore.type": "PKCS12"}, "k.p12 for .*No such file"),
        (TLS | {"ssl.keystore.key": "-----BEGIN"}, "ssl.keystore.key: it needs ssl.keystore.type=PEM"),
        (TLS | {"ssl.enabled.protocols": "TLSv1.1"}, "TLSv1.1 is not offered; allowed: TLSv1.2, TLSv1.3"),
        (SASL | {"sasl.mechanism": "GSSAPI"}, "'GSSAPI' is not one of PLAIN, SCRAM-SHA-256, SCRAM-SHA-512"),
        ({"security.protocol": "SASL_SSL"}, "'GSSAPI' is not one of"),
        (SASL | {"sasl.jaas.config": "x required;"}, "must have a login module with username"),
    ],
)
def test_unsupported_properties_are_rejected(properties: dict[str, str], problem: str) -> None:
    with pytest.raises(ConfigException, match=problem):
        AdminConfig.from_properties({"bootstrap.servers": "h:1", **properties})


def test_keys_that_security_uses_cause_no_warning() -> None:
    warnings: list[str] = []
    properties = {"bootstrap.servers": "h:1", **TLS, **SASL, "ssl.provider": "x", "security.protocol": "SASL_SSL"}
    config = AdminConfig.from_properties(properties, warnings.append)
    assert isinstance(config.security, PropertiesSecurity)
    assert warnings == ["ssl.provider has no effect here"]
