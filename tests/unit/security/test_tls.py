# SPDX-License-Identifier: Apache-2.0
"""TLS contexts out of ssl.* settings: what they agree on in a handshake, and the errors of unusable settings."""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass
from pathlib import Path

import pytest

from kcoord.security.tls import (
    TlsConfigError,
    TlsSettings,
    client_context,
    is_suite_allowed,
    load_key_entry,
    openssl_suite,
    server_context,
)
from tests.support.certificates import Authority, Identity

PASSWORD = "secret-of-the-store"


@dataclass(frozen=True)
class Keys:
    """An authority, the keys of a broker and of a client, and a folder for files."""

    authority: Authority
    broker: Identity
    client: Identity
    folder: Path

    def server(self, **values: str) -> ssl.SSLContext:
        own_key = {
            "ssl_keystore_type": "PEM",
            "ssl_keystore_key": self.broker.key_pem(),
            "ssl_keystore_certificate_chain": self.broker.chain_pem,
        }
        settings = settings_of(**{**own_key, **values})
        entry = load_key_entry(settings)
        assert entry is not None
        return server_context(settings, entry)

    def client_settings(self, **values: str) -> TlsSettings:
        return settings_of(
            **{"ssl_truststore_type": "PEM", "ssl_truststore_certificates": self.authority.pem, **values}
        )


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    authority = Authority()
    return Keys(authority, authority.issue("broker", "localhost", "127.0.0.1"), authority.issue("client"), tmp_path)


def settings_of(**values: str | None) -> TlsSettings:
    return TlsSettings({name.replace("_", "."): value for name, value in values.items()}, {})


def test_repr_shows_no_password() -> None:
    assert "key-secret" not in repr(settings_of(ssl_key_password="key-secret"))


def shake_hands(server: ssl.SSLContext, client: ssl.SSLContext, host: str = "localhost") -> ssl.SSLObject:
    """Returns the server's side after a handshake. Raises ssl.SSLError if either side refuses."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname=host),
    ]
    left = list(sides)
    for _ in range(10):
        for side in list(left):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            left.remove(side)
    assert left == []
    return sides[0]


@pytest.mark.parametrize("store_type", ["PKCS12", "JKS", "pkcs12"])
def test_a_pkcs12_keystore_is_read_as_java_does(keys: Keys, store_type: str) -> None:
    location = keys.broker.write_pkcs12(keys.folder / "broker.p12", PASSWORD)
    settings = settings_of(ssl_keystore_type=store_type, ssl_keystore_location=location, ssl_keystore_password=PASSWORD)
    entry = load_key_entry(settings)
    assert entry is not None
    side = shake_hands(server_context(settings, entry), client_context(keys.client_settings()))
    assert side.version() == "TLSv1.3"


@pytest.mark.parametrize("password", [None, "secret-of-the-key"])
def test_a_pem_file_has_key_and_certificates(keys: Keys, password: str | None) -> None:
    location = keys.broker.write_pem(keys.folder / "broker.pem", password)
    settings = settings_of(ssl_keystore_type="PEM", ssl_keystore_location=location, ssl_key_password=password)
    entry = load_key_entry(settings)
    assert entry is not None
    assert entry.alternative_names == load_names(keys.broker)
    shake_hands(server_context(settings, entry), client_context(keys.client_settings()))


def load_names(identity: Identity) -> frozenset[object]:
    entry = load_key_entry(
        settings_of(
            ssl_keystore_type="PEM",
            ssl_keystore_key=identity.key_pem(),
            ssl_keystore_certificate_chain=identity.chain_pem,
        )
    )
    assert entry is not None
    return frozenset(entry.alternative_names)


def test_a_client_shows_its_certificate_if_the_broker_requires_it(keys: Keys) -> None:
    trusted = {
        "ssl_truststore_type": "PEM",
        "ssl_truststore_location": keys.authority.write_pem(keys.folder / "ca.pem"),
    }
    server = keys.server(ssl_client_auth="required", **trusted)
    own_key = {
        "ssl_keystore_type": "PEM",
        "ssl_keystore_key": keys.client.key_pem(),
        "ssl_keystore_certificate_chain": keys.client.chain_pem,
    }
    side = shake_hands(server, client_context(keys.client_settings(**own_key)))
    certificate = side.getpeercert()
    assert certificate is not None
    assert certificate["subject"] == ((("commonName", "client"),),)
    with pytest.raises(ssl.SSLError, match="PEER_DID_NOT_RETURN_A_CERTIFICATE"):
        shake_hands(server, client_context(keys.client_settings()))
    stranger = Authority("Other").issue("client")
    own_key["ssl_keystore_key"], own_key["ssl_keystore_certificate_chain"] = stranger.key_pem(), stranger.chain_pem
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        shake_hands(server, client_context(keys.client_settings(**own_key)))
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        shake_hands(
            keys.server(ssl_client_auth="requested", **trusted), client_context(keys.client_settings(**own_key))
        )
    requested = keys.server(ssl_client_auth="requested", **trusted)
    assert shake_hands(requested, client_context(keys.client_settings())).getpeercert() is None


def test_the_name_of_the_broker_is_checked_unless_the_client_says_otherwise(keys: Keys) -> None:
    server = keys.server()
    with pytest.raises(ssl.SSLError, match="CERTIFICATE_VERIFY_FAILED"):
        shake_hands(server, client_context(keys.client_settings()), "elsewhere")
    unchecked = keys.client_settings(ssl_endpoint_identification_algorithm="")
    shake_hands(server, client_context(unchecked), "elsewhere")


@pytest.mark.parametrize("version", ["TLSv1.2", "TLSv1.3"])
def test_only_enabled_versions_are_offered(keys: Keys, version: str) -> None:
    server = keys.server(ssl_enabled_protocols=version)
    assert shake_hands(server, client_context(keys.client_settings())).version() == version
    other = {"TLSv1.2": "TLSv1.3", "TLSv1.3": "TLSv1.2"}[version]
    with pytest.raises(ssl.SSLError):
        shake_hands(server, client_context(keys.client_settings(ssl_enabled_protocols=other)))


@pytest.mark.parametrize(
    ("suites", "version", "openssl_name"),
    [
        ("TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384", "TLSv1.2", "ECDHE-ECDSA-AES256-GCM-SHA384"),
        ("TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256", "TLSv1.2", "ECDHE-ECDSA-CHACHA20-POLY1305"),
        ("TLS_AES_256_GCM_SHA384,TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256", "TLSv1.3", "TLS_AES_256_GCM_SHA384"),
        ("TLS_AES_256_GCM_SHA384", "TLSv1.3", "TLS_AES_256_GCM_SHA384"),
    ],
)
def test_suites_have_javas_names(keys: Keys, suites: str, version: str, openssl_name: str) -> None:
    side = shake_hands(keys.server(ssl_cipher_suites=suites), client_context(keys.client_settings()))
    cipher = side.cipher()
    assert cipher is not None
    assert (side.version(), cipher[0]) == (version, openssl_name)
    assert is_suite_allowed(settings_of(ssl_cipher_suites=suites), cipher[0])


def test_a_suite_of_tls_1_3_that_is_left_out_is_not_allowed() -> None:
    settings = settings_of(ssl_cipher_suites="TLS_AES_256_GCM_SHA384")
    assert not is_suite_allowed(settings, "TLS_AES_128_GCM_SHA256")
    assert is_suite_allowed(settings_of(), "TLS_AES_128_GCM_SHA256")


def test_every_suite_of_the_library_has_a_name_of_java() -> None:
    """The names that the standard gives to the suites which Python's OpenSSL offers by default."""
    exchanges = {"": "RSA", "DHE-RSA-": "DHE_RSA", "ECDHE-RSA-": "ECDHE_RSA", "ECDHE-ECDSA-": "ECDHE_ECDSA"}
    names = [
        f"TLS_{exchange}_WITH_{cipher}"
        for exchange in exchanges.values()
        for cipher in ("AES_128_GCM_SHA256", "AES_256_GCM_SHA384", "CHACHA20_POLY1305_SHA256", "AES_256_CBC_SHA384")
    ]
    offered = {cipher["name"] for cipher in ssl.create_default_context().get_ciphers()}
    translated = {openssl_suite(name) for name in names}
    assert {name for name in offered if name.startswith("ECDHE") and name.endswith("GCM-SHA384")} <= translated
    assert "ECDHE-RSA-CHACHA20-POLY1305" in translated & offered
    assert openssl_suite("TLS_RSA_WITH_AES_128_CBC_SHA") == "AES128-SHA"
    assert openssl_suite("TLS_ECDHE_RSA_WITH_AES_128_CBC_SHA256") == "ECDHE-RSA-AES128-SHA256"


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"ssl_client_auth": "maybe"},
            "Invalid value maybe for configuration ssl.client.auth: allowed: none, requested",
        ),
        (
            {"ssl_enabled_protocols": "TLSv1.1"},
            "Invalid value TLSv1.1 for configuration ssl.enabled.protocols: TLSv1.1 is",
        ),
        ({"ssl_cipher_suites": "TLS_NO_SUCH"}, "ssl.cipher.suites: the TLS library does not offer TLS_NO_SUCH"),
        (
            {"ssl_cipher_suites": "TLS_AES_256_GCM_SHA384", "ssl_enabled_protocols": "TLSv1.2"},
            "ssl.cipher.suites: no suite is of a version in ssl.enabled.protocols",
        ),
        (
            {"ssl_keystore_type": "BKS"},
            "Invalid value BKS for configuration ssl.keystore.type: allowed: JKS, PKCS12, PEM",
        ),
        ({"ssl_keystore_type": "PKCS12"}, "ssl.keystore.key: it needs ssl.keystore.type=PEM"),
        ({"ssl_keystore_location": "/x"}, "ssl.keystore.location: it cannot be set beside ssl.keystore.key"),
        ({"ssl_keystore_password": "pw"}, "ssl.keystore.password: a keystore in PEM form has no password"),
        ({"ssl_keystore_key": "nonsense"}, "ssl.keystore.key: there is no private key in PEM form"),
        ({"ssl_keystore_certificate_chain": "nonsense"}, "certificate.chain: there is no certificate in PEM form"),
        ({"ssl_keystore_certificate_chain": ""}, "ssl.keystore.certificate.chain: key and certificate chain must be"),
        (
            {"ssl_client_auth": "required", "ssl_truststore_location": "/no/such"},
            "ssl.truststore.location: the file cannot",
        ),
        (
            {"ssl_client_auth": "required", "ssl_truststore_certificates": "x"},
            "ssl.truststore.certificates: it needs ssl.truststore.type=PEM",
        ),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(keys: Keys, values: dict[str, str], text: str) -> None:
    with pytest.raises(TlsConfigError, match=re.escape(text)):
        keys.server(**values)


@pytest.mark.parametrize("suites", ["ECDHE-ECDSA-AES256-GCM-SHA384", "TLS_AES_128_GCM_SHA256"])
def test_suites_that_a_listener_could_not_keep_to_are_refused(keys: Keys, suites: str) -> None:
    """OpenSSL's own names, and suites of TLS 1.3 without the one on which OpenSSL agrees with most clients."""
    with pytest.raises(TlsConfigError, match=r"ssl\.cipher\.suites: the TLS library"):
        keys.server(ssl_cipher_suites=suites)


def test_a_client_allows_all_suites_of_tls_1_3_or_none(keys: Keys) -> None:
    with pytest.raises(TlsConfigError, match="name all of them, or none"):
        client_context(keys.client_settings(ssl_cipher_suites="TLS_AES_256_GCM_SHA384"))
    older = client_context(keys.client_settings(ssl_cipher_suites="TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"))
    assert shake_hands(keys.server(), older).version() == "TLSv1.2"


def test_a_key_of_another_certificate_is_refused(keys: Keys) -> None:
    with pytest.raises(TlsConfigError, match=r"ssl\.keystore\.key: key and certificate cannot be used together"):
        keys.server(ssl_keystore_certificate_chain=keys.client.chain_pem)


def test_errors_of_files_say_what_to_do_and_show_no_secret(keys: Keys) -> None:
    jks, pem = keys.folder / "store.jks", keys.folder / "store.pem"
    jks.write_bytes(b"\xfe\xed\xfe\xed\0\0\0\2")
    keys.broker.write_pem(pem, "right-password")
    pkcs12 = keys.broker.write_pkcs12(keys.folder / "store.p12", PASSWORD)
    for values, text in (
        ({"location": str(jks)}, "JKS format, which is not read; convert it: keytool -importkeystore -srckeystore"),
        ({"location": str(pem)}, "the file is in PEM form; set ssl.keystore.type=PEM"),
        ({"location": pkcs12, "password": "wrong-password"}, "ssl.keystore.password is not its password"),
        ({"location": str(keys.folder / "missing")}, "the file cannot be read: No such file or directory"),
    ):
        settings = settings_of(**{f"ssl_keystore_{name}": value for name, value in values.items()})
        with pytest.raises(TlsConfigError, match=re.escape(text)) as caught:
            load_key_entry(settings)
        assert "wrong-password" not in str(caught.value)
    settings = settings_of(ssl_keystore_type="PEM", ssl_keystore_location=str(pem), ssl_key_password="wrong-password")
    with pytest.raises(TlsConfigError, match=r"cannot be read with this ssl\.key\.password") as caught:
        load_key_entry(settings)
    assert "wrong-password" not in str(caught.value)


def test_an_error_calls_a_key_by_the_name_under_which_it_was_set() -> None:
    key = "ssl.keystore.location"
    settings = TlsSettings({key: "/no/such"}, {key: f"listener.name.clients.{key}"})
    with pytest.raises(TlsConfigError, match=r"Invalid value /no/such for configuration listener\.name\.clients\.ssl"):
        load_key_entry(settings)
