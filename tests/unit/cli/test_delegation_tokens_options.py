# SPDX-License-Identifier: Apache-2.0
"""The option combinations of `kcoord delegation-tokens`, with the texts of Kafka's tool."""

from __future__ import annotations

import pytest

from kcoord.cli import delegation_tokens

LIFE = ["--max-life-time-period", "-1"]
HMAC = ["--hmac", "YWJj"]
RENEW, EXPIRE = ["--renew-time-period", "-1"], ["--expiry-time-period", "5"]
ONE = "Command must include exactly one action: --create, --renew, --expire or --describe"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--create", *LIFE], None),
        (["--create", *LIFE, "--owner-principal", "User:a", "--renewer-principal", "User:b", "--json"], None),
        (["--renew", *HMAC, *RENEW], None),
        (["--expire", "--hmac", "-", *EXPIRE], None),
        (["--describe"], None),
        (["--describe", "--owner-principal", "User:a", "--owner-principal", "User:b", "--json"], None),
        ([], ONE),
        (["--create", "--describe", *LIFE], ONE),
        (["--create"], "Missing required argument --max-life-time-period"),
        (["--renew", *RENEW], "Missing required argument --hmac"),
        (["--renew", *HMAC], "Missing required argument --renew-time-period"),
        (["--expire", *HMAC], "Missing required argument --expiry-time-period"),
        (["--create", *LIFE, *HMAC], "Option --create can't be used with option --hmac"),
        (["--renew", *HMAC, *RENEW, *LIFE], "Option --renew can't be used with option --max-life-time-period"),
        (["--expire", *HMAC, *EXPIRE, *RENEW], "Option --expire can't be used with option --renew-time-period"),
        (["--describe", *EXPIRE], "Option --describe can't be used with option --expiry-time-period"),
        (["--describe", "--renewer-principal", "User:b"], "can't be used with option --renewer-principal"),
        (["--renew", *HMAC, *RENEW, "--json"], "--json goes with --create and --describe"),
        (["--create", *LIFE, *["--owner-principal", "User:a"] * 2], "a token has one owner"),
        (
            ["--describe", "--owner-principal", "alice"],
            "expected a string in format principalType:principalName but got alice",
        ),
    ],
)
def test_options(arguments: list[str], problem: str | None) -> None:
    actual = delegation_tokens.find_problem(delegation_tokens.make_parser().parse_args(arguments))
    assert (actual is None) if problem is None else (problem in (actual or ""))
