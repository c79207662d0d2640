# SPDX-License-Identifier: Apache-2.0
"""`kcoord delegation-tokens --create|--renew|--expire|--describe`: delegation tokens (KIP-48).

Options and output are those of kafka-delegation-tokens.sh. `--json` prints tokens as JSON. The HMAC is the password of
a token, and other users of a machine can see arguments, so `--hmac -` reads it from standard input.
"""

from __future__ import annotations

import argparse
import base64
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Final

from kcoord.cli.options import MOST_LONG, option_name, parse_options, whole_number
from kcoord.cli.output import print_json
from kcoord.cli.session import CommandError, add_connection_options, add_json_option, run_with_admin
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.delegation_tokens import DelegationToken

_ACTIONS: Final = ("create", "renew", "expire", "describe")
_REQUIRED: Final = {
    "create": ("max_life_time_period",),
    "renew": ("hmac", "renew_time_period"),
    "expire": ("hmac", "expiry_time_period"),
    "describe": (),
}
_ALLOWED: Final = {
    "create": {"owner_principal", "renewer_principal", "max_life_time_period"},
    "renew": {"hmac", "renew_time_period"},
    "expire": {"hmac", "expiry_time_period"},
    "describe": {"owner_principal"},
}
_OPTIONS: Final = (
    "owner_principal",
    "renewer_principal",
    "max_life_time_period",
    "renew_time_period",
    "expiry_time_period",
    "hmac",
)
_TITLES: Final = ("TOKENID", "HMAC", "OWNER", "REQUESTER", "RENEWERS", "ISSUEDATE", "EXPIRYDATE", "MAXDATE")
_WIDTHS: Final = (15, 30, 15, 15, 25, 15, 15, 15)
_STANDARD_INPUT: Final = "-"


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kcoord delegation-tokens", description=__doc__, allow_abbrev=False)
    parser.add_argument("--create", action="store_true", help="create a token")
    parser.add_argument("--renew", action="store_true", help="let a token expire later")
    parser.add_argument("--expire", action="store_true", help="let a token expire at another time, or at once")
    parser.add_argument(
        "--describe", action="store_true", help="list tokens: those of --owner-principal, or all that you may see"
    )
    for name, text in (
        ("--owner-principal", "with --create the owner, if it is not you; with --describe owners or renewers"),
        ("--renewer-principal", "a principal that may renew and expire the token"),
    ):
        parser.add_argument(name, action="append", default=[], metavar="TYPE:NAME", help=f"{text}; may be repeated")
    for name, text in (
        ("--max-life-time-period", "time after which the token cannot be renewed, -1 for the longest possible"),
        ("--renew-time-period", "time from now at which the token expires, -1 for the default of the broker"),
        ("--expiry-time-period", "time from now at which the token expires, -1 to remove it at once"),
    ):
        parser.add_argument(name, type=whole_number(-MOST_LONG - 1, MOST_LONG), metavar="MS", help=text)
    parser.add_argument("--hmac", metavar="BASE64", help="the HMAC of the token, - to read it from standard input")
    add_connection_options(parser)
    add_json_option(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parse_options(parser, arguments, find_problem)
    work = {"create": _create, "renew": _renew, "expire": _expire, "describe": _describe}[_actions_of(options)[0]]
    return run_with_admin(parser.prog, options, work)


def _actions_of(options: argparse.Namespace) -> list[str]:
    return [action for action in _ACTIONS if getattr(options, action)]


def find_problem(options: argparse.Namespace) -> str | None:
    """Returns why the options cannot be combined, or None if they can. The texts are those of Kafka's tool."""
    actions = _actions_of(options)
    if len(actions) != 1:
        return "Command must include exactly one action: --create, --renew, --expire or --describe"
    action = actions[0]
    for name in _REQUIRED[action]:
        if getattr(options, name) is None:
            return f"Missing required argument {option_name(name)}"
    for name in _OPTIONS:
        if getattr(options, name) not in (None, []) and name not in _ALLOWED[action]:
            return f"Option --{action} can't be used with option {option_name(name)}"
    if options.json and action in ("renew", "expire"):
        return "--json goes with --create and --describe"
    if action == "create" and len(options.owner_principal) > 1:
        return "a token has one owner, so --create takes one --owner-principal"
    for principal in options.owner_principal + options.renewer_principal:
        kind, _, name = principal.strip().partition(":")
        if not kind or not name:
            return f"expected a string in format principalType:principalName but got {principal}"
    return None


async def _create(admin: AdminClient, options: argparse.Namespace) -> int:
    owners, renewers = _principals(options.owner_principal), _principals(options.renewer_principal)
    period_ms = options.max_life_time_period
    if not options.json:
        print(
            f"Calling create token operation with renewers :{_list_text(renewers)} , max-life-time-period :{period_ms}"
        )
    token = await admin.create_delegation_token(
        owner=owners[0] if owners else None, renewers=renewers, max_life_time_ms=period_ms
    )
    if options.json:
        print_json(_as_json(token))
    else:
        print(f"Created delegation token with tokenId : {token.token_id}")
        _print_tokens([token])
    return 0


async def _renew(admin: AdminClient, options: argparse.Namespace) -> int:
    text, hmac = _hmac_of(options)
    period_ms = options.renew_time_period
    print(f"Calling renew token operation with hmac :{text} , renew-time-period :{period_ms}")
    expiry = await admin.renew_delegation_token(hmac, renew_time_period_ms=period_ms)
    print(f"Completed renew operation. New expiry date : {_date(expiry)}")
    return 0


async def _expire(admin: AdminClient, options: argparse.Namespace) -> int:
    text, hmac = _hmac_of(options)
    period_ms = options.expiry_time_period
    print(f"Calling expire token operation with hmac :{text} , expire-time-period :{period_ms}")
    expiry = await admin.expire_delegation_token(hmac, expiry_time_period_ms=period_ms)
    print(f"Completed expire operation. New expiry date : {_date(expiry)}")
    return 0


async def _describe(admin: AdminClient, options: argparse.Namespace) -> int:
    owners = _principals(options.owner_principal)
    if not options.json:
        whose = f"for owners: {_list_text(owners)}" if owners else "for current user."
        print(f"Calling describe token operation {whose}")
    tokens = await admin.describe_delegation_tokens(owners or None)
    if options.json:
        print_json([_as_json(token) for token in tokens])
    else:
        print(f"Total number of tokens : {len(tokens)}")
        _print_tokens(tokens)
    return 0


def _principals(options: Iterable[str]) -> list[str]:
    return [principal.strip() for principal in options]


def _hmac_of(options: argparse.Namespace) -> tuple[str, bytes]:
    """Returns the HMAC as it was given, and in bytes. One from standard input is not repeated."""
    is_read = options.hmac == _STANDARD_INPUT
    text = sys.stdin.readline().strip() if is_read else options.hmac
    try:
        return "[hidden]" if is_read else text, base64.b64decode(text, validate=True)
    except ValueError:
        raise CommandError("The HMAC is not base64") from None


def _list_text(names: Iterable[str]) -> str:
    return f"[{', '.join(names)}]"


def _date(time_ms: int) -> str:
    try:
        return datetime.fromtimestamp(time_ms / 1000).strftime("%Y-%m-%dT%H:%M")
    except (ValueError, OverflowError, OSError):
        # Later than the year 9999: the broker has no limit.
        return str(time_ms)


def _print_tokens(tokens: Iterable[DelegationToken]) -> None:
    """Prints the table of Kafka's tool, which has an empty line before each row."""
    rows = [
        (
            token.token_id,
            token.hmac_as_base64,
            token.owner,
            token.token_requester,
            _list_text(token.renewers),
            _date(token.issue_timestamp),
            _date(token.expiry_timestamp),
            _date(token.max_timestamp),
        )
        for token in tokens
    ]
    for row in (_TITLES, *rows):
        print("\n" + " ".join(text.ljust(width) for text, width in zip(row, _WIDTHS, strict=True)))


def _as_json(token: DelegationToken) -> dict[str, object]:
    return {
        "token_id": token.token_id,
        "hmac": token.hmac_as_base64,
        "owner": token.owner,
        "requester": token.token_requester or None,
        "renewers": list(token.renewers),
        "issue_timestamp": token.issue_timestamp,
        "expiry_timestamp": token.expiry_timestamp,
        "max_timestamp": token.max_timestamp,
    }
