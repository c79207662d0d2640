# SPDX-License-Identifier: Apache-2.0
"""The server's side of SCRAM: the vector of RFC 7677, the project's client as counterpart, and every refusal."""

from __future__ import annotations

import base64
import hashlib
import hmac

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kcoord.client.scram import ScramExchange
from kcoord.metadata.image import ScramCredential
from kcoord.security.rejection import OTHER_AUTHORIZATION_ID, Rejection
from kcoord.security.scram import Decoys, ScramServerExchange
from kcoord.security.scram_messages import HASHES, MIN_ITERATIONS, ScramError

MECHANISMS = sorted(HASHES)
NAMES = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1)
NONCES = st.from_regex(r"[\x21-\x2b\x2d-\x7e]{1,40}", fullmatch=True)


def credential_of(mechanism: str, password: str, salt: bytes = b"salt", iterations: int = 4096) -> ScramCredential:
    """Returns the credential of a password, computed by the definitions in RFC 5802."""
    name = HASHES[mechanism]
    salted = hashlib.pbkdf2_hmac(name, password.encode(), salt, iterations)
    client_key = hmac.digest(salted, b"Client Key", name)
    return ScramCredential(
        salt, hashlib.new(name, client_key).digest(), hmac.digest(salted, b"Server Key", name), iterations
    )


class Server:
    """A server that knows one user."""

    def __init__(self, mechanism: str, user: str, credential: ScramCredential) -> None:
        self._mechanism = mechanism
        self._known = {(mechanism, user): credential}

    def exchange(self, nonce: str = "server", decoy_key: bytes = b"key") -> ScramServerExchange:
        decoys = Decoys.of(decoy_key, self._known)
        return ScramServerExchange(self._mechanism, lambda *key: self._known.get(key), nonce, decoys)


ALICE = credential_of("SCRAM-SHA-256", "pencil")


def alice(nonce: str = "server") -> ScramServerExchange:
    return Server("SCRAM-SHA-256", "alice", ALICE).exchange(nonce)


def test_the_exchange_of_rfc_7677() -> None:
    salt = base64.b64decode("W22ZaJ0SNY7soEsUEjb6gQ==")
    server = Server("SCRAM-SHA-256", "user", credential_of("SCRAM-SHA-256", "pencil", salt))
    exchange = server.exchange("%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0")
    first = exchange.respond(b"n,,n=user,r=rOprNGfwEbeRWgbNEkqO")
    assert first == b"r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,s=W22ZaJ0SNY7soEsUEjb6gQ==,i=4096"
    assert not exchange.is_complete
    final = exchange.respond(
        b"c=biws,r=rOprNGfwEbeRWgbNEkqO%hvYDpWUa2RaTCAfuxFIlj)hNlF$k0,p=dHzbZapWIk4jUhN+Ute9ytag9zjfMHgsqmmiz7AndVQ="
    )
    assert final == b"v=6rriTRBi23WpRR/wtup+mMhUZUn/dB5nLTJRsjl95G4="
    assert (exchange.is_complete, exchange.user) == (True, "user")


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(MECHANISMS),
    NAMES,
    st.text(st.characters(exclude_categories=["Cs"])),
    NONCES,
    NONCES,
    st.binary(max_size=40),
)
def test_client_and_server_agree(
    mechanism: str, user: str, password: str, client_nonce: str, server_nonce: str, salt: bytes
) -> None:
    server = Server(mechanism, user, credential_of(mechanism, password, salt)).exchange(server_nonce)
    client = ScramExchange(mechanism, user, password, client_nonce)
    client.verify(server.respond(client.final(server.respond(client.first()))))
    assert (server.is_complete, server.user) == (True, user)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(MECHANISMS), st.text(st.characters(exclude_categories=["Cs"]), max_size=20))
def test_another_password_is_refused(mechanism: str, password: str) -> None:
    server = Server(mechanism, "u", credential_of(mechanism, password + "x")).exchange()
    client = ScramExchange(mechanism, "u", password, "n")
    with pytest.raises(Rejection, match="does not exist, or the password is wrong"):
        server.respond(client.final(server.respond(client.first())))
    assert not server.is_complete


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_an_unknown_user_goes_through_the_same_exchange(mechanism: str) -> None:
    server = Server(mechanism, "known", credential_of(mechanism, "pw"))

    def first(user: str, decoy_key: bytes = b"key") -> bytes:
        return server.exchange(decoy_key=decoy_key).respond(f"n,,n={user},r=n".encode())

    assert first("unknown") == first("unknown") != first("other")
    assert first("unknown") != first("unknown", b"another key")
    fields = dict(part.split("=", 1) for part in first("unknown").decode().split(","))
    assert fields["i"] == str(MIN_ITERATIONS)
    salt = base64.b64decode(fields["s"]).decode()
    assert salt.isalnum() and 20 <= len(salt) <= 26
    exchange, client = server.exchange(), ScramExchange(mechanism, "unknown", "pw", "n")
    with pytest.raises(Rejection, match="does not exist, or the password is wrong") as caught:
        exchange.respond(client.final(exchange.respond(client.first())))
    assert caught.value.client_text is None


def iterations_of_unknown_users(counts: dict[int, int], users: int = 600) -> list[int]:
    """Returns the iterations that the first answers to unknown users have. `counts`: credentials by iterations."""
    decoys = Decoys(b"key", {"SCRAM-SHA-512": counts, "SCRAM-SHA-256": {5000: 1}})
    return [decoys.credential("SCRAM-SHA-512", f"user-{number}").iterations for number in range(users)]


def test_the_iterations_of_unknown_users_are_those_of_users() -> None:
    assert set(iterations_of_unknown_users({})) == {MIN_ITERATIONS}
    assert set(iterations_of_unknown_users({8192: 1})) == {8192}
    assert set(iterations_of_unknown_users({8192: 1, MIN_ITERATIONS - 1: 9})) == {8192}
    mixed = iterations_of_unknown_users({4096: 3, 8192: 2, 16384: 1})
    frequency = [mixed.count(iterations) / len(mixed) for iterations in (4096, 8192, 16384)]
    assert frequency == pytest.approx([3 / 6, 2 / 6, 1 / 6], abs=0.06)


def test_a_new_credential_changes_few_unknown_users() -> None:
    before = iterations_of_unknown_users({4096: 30, 8192: 20})
    after = iterations_of_unknown_users({4096: 30, 8192: 21})
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    # One of 51 has been added. Users who change can only get its number.
    assert set(changed) <= {(4096, 8192)}
    assert len(changed) < 600 * 2 / 51


def test_decoys_count_the_credentials_of_a_mechanism() -> None:
    credentials = {
        ("SCRAM-SHA-256", "a"): credential_of("SCRAM-SHA-256", "pw"),
        ("SCRAM-SHA-256", "b"): credential_of("SCRAM-SHA-256", "pw", iterations=8192),
        ("SCRAM-SHA-512", "a"): credential_of("SCRAM-SHA-512", "pw", iterations=8192),
    }
    assert Decoys.of(b"key", credentials).counts == {"SCRAM-SHA-256": {4096: 1, 8192: 1}, "SCRAM-SHA-512": {8192: 1}}


@pytest.mark.parametrize("sizes", [(31, 32), (33, 32), (32, 31), (0, 0), (64, 64)])
def test_a_credential_with_keys_of_a_wrong_length_does_not_count(sizes: tuple[int, int]) -> None:
    """Not even if the client sends a proof of that length."""
    stored_key, server_key = map(bytes, sizes)
    server = Server("SCRAM-SHA-256", "alice", ScramCredential(b"salt", stored_key, server_key, 4096)).exchange()
    assert b"s=salt" not in server.respond(b"n,,n=alice,r=client")
    for size in {sizes[0], 32}:
        proof = base64.b64encode(bytes(size))
        with pytest.raises(Rejection):
            server.respond(b"c=biws,r=clientserver,p=" + proof)


def test_a_credential_with_too_few_iterations_does_not_count() -> None:
    weak = credential_of("SCRAM-SHA-256", "pw", iterations=MIN_ITERATIONS - 1)
    exchange = Server("SCRAM-SHA-256", "u", weak).exchange()
    assert exchange.respond(b"n,,n=u,r=n").endswith(b",i=4096")


@pytest.mark.parametrize(
    "message",
    [
        b"",
        b"n,,n=alice",
        b"n,,r=nonce",
        b"n,,n=,r=nonce",
        b"n,,n=alice,r=",
        b"y,,n=alice,r=nonce",
        b"p=tls-unique,,n=alice,r=nonce",
        b"n,,m=must,n=alice,r=nonce",
        b"n,,n=al=ice,r=nonce",
        b"n,,n=alice,r=non\xc3\xa9",
        b"n,,n=alice,r=nonce,extension",
        b"n,a=,n=alice,r=nonce",
        b"n,,n=alice\0,r=nonce",
        b"n,,n=\xff,r=nonce",
        b"n,,n=alice,r=nonce\n",
    ],
)
def test_first_messages_that_are_refused(message: bytes) -> None:
    with pytest.raises(Rejection) as caught:
        alice().respond(message)
    assert caught.value.client_text is None


def test_names_extensions_and_the_own_authorization_id() -> None:
    exchange = alice()
    assert exchange.respond(b"n,a=alice,n=alice,r=n,tokenauth=yes,x=y").startswith(b"r=nserver,")
    exchange = alice()
    exchange.respond(b"n,,n=a=3Db=2Cc=3D2C,r=n")
    assert exchange.user == "a=b,c=2C"


@pytest.mark.parametrize("user", ["alice", "unknown"])
def test_another_authorization_id_is_refused_alike_for_all_users(user: str) -> None:
    with pytest.raises(Rejection) as caught:
        alice().respond(f"n,a=root,n={user},r=n".encode())
    assert caught.value.client_text == OTHER_AUTHORIZATION_ID


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b"r=nserver", b"r=n"),
        (b"r=nserver", b"r=nserver2"),
        (b"c=biws", b"c=eSws"),
        (b"c=biws", b"c=bi"),
        (b"c=biws,", b""),
        (b",p=", b",p=AAAA"),
        (b",p=", b",p=A"),
        (b",p=", b",q="),
        (b",p=", b",x=y,p="),
        (b",r=", b",r=\0"),
    ],
)
def test_changed_final_messages_are_refused(old: bytes, new: bytes) -> None:
    exchange, client = alice(), ScramExchange("SCRAM-SHA-256", "alice", "pencil", "n")
    final = client.final(exchange.respond(client.first()))
    with pytest.raises((Rejection, ScramError)):
        exchange.respond(final.replace(old, new))
    assert not exchange.is_complete


def test_a_recorded_final_message_does_not_work_again() -> None:
    client = ScramExchange("SCRAM-SHA-256", "alice", "pencil", "n")
    first = alice(nonce="one")
    recorded = client.final(first.respond(client.first()))
    first.respond(recorded)
    second = alice(nonce="two")
    second.respond(client.first())
    with pytest.raises(Rejection, match="nonce"):
        second.respond(recorded)
