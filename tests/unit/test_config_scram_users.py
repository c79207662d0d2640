# SPDX-License-Identifier: Apache-2.0
"""Users in the form of Kafka's storage tool: what is accepted, and errors that repeat no secret."""

from __future__ import annotations

import pytest

from kcoord.config import BROKER_KEYS, BrokerConfig, ConfigError
from kcoord.config.scram_users import ScramUser, parse_bootstrap_scram, parse_scram_users
from kcoord_protocol.scram_mechanisms import ScramMechanism

SHA_256, SHA_512 = ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512


@pytest.mark.parametrize(
    ("text", "user"),
    [
        ("SCRAM-SHA-256=[name=alice,password=pw]", ScramUser(SHA_256, "alice", "pw", None, None, 4096)),
        (
            " SCRAM-SHA-512=[iterations=8192, name=bob,password=p=w[] ,salt=c2FsdA==] ",
            ScramUser(SHA_512, "bob", "p=w[] ", None, b"salt", 8192),
        ),
        (
            'SCRAM-SHA-512=[name=alice,iterations=8192,salt="N3E=",saltedpassword="YCE="]',
            ScramUser(SHA_512, "alice", None, b"`!", b"7q", 8192),
        ),
        ('SCRAM-SHA-256=[name="a b",password="]"]', ScramUser(SHA_256, "a b", "]", None, None, 4096)),
    ],
)
def test_users(text: str, user: ScramUser) -> None:
    assert parse_scram_users([text]) == [user]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("secret", "a user is not MECHANISM="),
        ("SCRAM-SHA-256=name=a,password=secret", "a user is not MECHANISM="),
        ("SCRAM-SHA-256=[name=a,password=secret", "a user is not MECHANISM="),
        ("SCRAM-SHA-1=[name=a,password=secret]", "'SCRAM-SHA-1' is not one of SCRAM-SHA-256, SCRAM-SHA-512"),
        ("SCRAM-SHA-256=[password=secret]", "give name=NAME"),
        ("SCRAM-SHA-256=[name=,password=secret]", "give name=NAME"),
        ("SCRAM-SHA-256=[name=a]", "needs one of password and saltedpassword"),
        ("SCRAM-SHA-256=[name=a,password=secret,saltedpassword=YCE=]", "needs one of password and saltedpassword"),
        ("SCRAM-SHA-256=[name=a,saltedpassword=secret]", "needs the salt of its saltedpassword"),
        ("SCRAM-SHA-256=[name=a,password=]", "the password of user 'a' is empty"),
        ("SCRAM-SHA-256=[name=a,salt=YCE=,saltedpassword=]", "the password of user 'a' is empty"),
        ("SCRAM-SHA-256=[name=a,password=secret,salt=]", "the salt of user 'a' is empty"),
        ("SCRAM-SHA-256=[name=a,password=secret,salt=%%]", "the salt of user 'a' is not base64"),
        ("SCRAM-SHA-256=[name=a,salt=YCE=,saltedpassword=secret!]", "the saltedpassword of user 'a' is not base64"),
        ("SCRAM-SHA-256=[name=a,password=secret,iterations=x]", "are not from 4096 to 16384"),
        ("SCRAM-SHA-256=[name=a,password=secret,iterations=4095]", "are not from 4096 to 16384"),
        ("SCRAM-SHA-256=[name=a,password=secret,iterations=16385]", "are not from 4096 to 16384"),
        ("SCRAM-SHA-256=[name=a,password=secret,secret=x]", "a user has an unknown field"),
        ("SCRAM-SHA-256=[name=a,password=se,cret]", "a user has an unknown field"),
        ("SCRAM-SHA-256=[name=a,password=secret,]", "a user has an unknown field"),
        ("SCRAM-SHA-256=[name=a,password=secret,password=secret]", "a user has password twice"),
    ],
)
def test_wrong_users(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_scram_users([text])
    assert problem in str(caught.value)
    assert "secret" not in str(caught.value)
    with pytest.raises(ConfigError) as at_start:
        BrokerConfig.from_properties({"kcoord.bootstrap.scram": text})
    shown = f"Invalid value [hidden] for configuration kcoord.bootstrap.scram: {caught.value}"
    assert str(at_start.value) == shown


def test_several_users() -> None:
    users = [f"SCRAM-SHA-256=[name={name},password=pw]" for name in "ab"]
    users.append("SCRAM-SHA-512=[name=a,password=pw]")
    assert parse_bootstrap_scram(", ".join(users)) == parse_scram_users(users)
    assert parse_bootstrap_scram(" ") == []
    assert len(BrokerConfig.from_properties({"kcoord.bootstrap.scram": ",".join(users)}).bootstrap_users) == 3
    with pytest.raises(ValueError, match="user 'a' occurs twice for SCRAM-SHA-256"):
        parse_scram_users([users[0], users[0]])
    with pytest.raises(ConfigError, match="a user is not MECHANISM"):
        parse_bootstrap_scram(users[0] + ",")


def test_secrets_are_hidden() -> None:
    (user,) = parse_scram_users(["SCRAM-SHA-256=[name=a,salt=YCE=,saltedpassword=YCE=]"])
    assert "`!" not in repr(user)
    assert "YCE" not in repr(user)
    assert BROKER_KEYS["kcoord.bootstrap.scram"].sensitive
