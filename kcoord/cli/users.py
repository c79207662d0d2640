# SPDX-License-Identifier: Apache-2.0
"""`kcoord users list|describe|add|alter|delete`: the SCRAM credentials of users (KIP-554).

A password is read from the terminal or from a file, since other users of a machine can see arguments. The broker gets
the salted password only.
"""

from __future__ import annotations

import argparse
import getpass
import sys
from collections.abc import Sequence
from pathlib import Path

from kcoord.cli.options import parse_options
from kcoord.cli.output import OutputColumn, print_json, print_rows
from kcoord.cli.session import (
    EXIT_FAILED,
    CommandError,
    add_connection_options,
    add_json_option,
    error_text,
    report_failure,
    run_with_admin,
)
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.scram_credentials import (
    ScramCredentialInfo,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from kcoord.config.properties import read_text
from kcoord_protocol.errors import Errors
from kcoord_protocol.scram_mechanisms import MAX_ITERATIONS, MIN_ITERATIONS, ScramMechanism

LIST, DESCRIBE, ADD, ALTER, DELETE = "list", "describe", "add", "alter", "delete"
_MECHANISMS = {mechanism.mechanism_name: mechanism for mechanism in ScramMechanism}
_DEFAULT_MECHANISM = ScramMechanism.SCRAM_SHA_512.mechanism_name
_STANDARD_INPUT = Path("-")
_COLUMNS = [
    OutputColumn("USER", "user"),
    OutputColumn("MECHANISM", "mechanism"),
    OutputColumn("ITERATIONS", "iterations"),
]


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="kcoord users", description=__doc__, allow_abbrev=False)
    parser.add_argument("action", choices=(LIST, DESCRIBE, ADD, ALTER, DELETE))
    parser.add_argument("--user", metavar="NAME", help="a user; all actions but list need it")
    parser.add_argument(
        "--mechanism",
        choices=_MECHANISMS,
        help=f"a SCRAM mechanism (default {_DEFAULT_MECHANISM}; with {DELETE}: all that the user has)",
    )
    parser.add_argument(
        "--iterations",
        type=int,
        metavar="N",
        help=f"how often the password is hashed, {MIN_ITERATIONS} to {MAX_ITERATIONS} (default {MIN_ITERATIONS})",
    )
    parser.add_argument(
        "--password-file",
        type=Path,
        metavar="FILE",
        help="a file whose first line is the password, - for standard input (default: ask at the terminal)",
    )
    add_connection_options(parser)
    add_json_option(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    parser = make_parser()
    options = parse_options(parser, arguments, find_problem)
    work = {LIST: _list, DESCRIBE: _list, ADD: _put, ALTER: _put, DELETE: _delete}[options.action]
    return run_with_admin(parser.prog, options, work)


def find_problem(options: argparse.Namespace) -> str | None:
    """Returns why the options cannot be combined, or None if they can."""
    action = options.action
    if action == LIST and options.user is not None:
        return f"{LIST} shows all users; use {DESCRIBE} for one of them"
    if action != LIST and not options.user:
        return f"{action} needs --user"
    if action not in (ADD, ALTER):
        if options.iterations is not None or options.password_file is not None:
            return f"--iterations and --password-file go with {ADD} and {ALTER}"
        if action != DELETE and options.mechanism is not None:
            return f"--mechanism does not go with {action}"
    elif options.iterations is not None and not MIN_ITERATIONS <= options.iterations <= MAX_ITERATIONS:
        return f"--iterations: {options.iterations} is not between {MIN_ITERATIONS} and {MAX_ITERATIONS}"
    return None


async def _list(admin: AdminClient, options: argparse.Namespace) -> int:
    results = await admin.describe_user_scram_credentials([] if options.user is None else [options.user])
    rows = [
        {"user": user, "mechanism": info.mechanism.mechanism_name, "iterations": info.iterations}
        for user, infos in sorted(results.values.items())
        for info in infos
    ]
    if rows or options.json:
        print_rows(_COLUMNS, rows, as_json=options.json)
    for error in results.errors.values():
        report_failure(error_text(error))
    return EXIT_FAILED if results.errors else 0


async def _put(admin: AdminClient, options: argparse.Namespace) -> int:
    mechanism = _MECHANISMS[options.mechanism or _DEFAULT_MECHANISM]
    exists = mechanism in await _mechanisms_of(admin, options.user)
    if exists and options.action == ADD:
        raise CommandError(f"User {options.user} already has a credential for {mechanism.mechanism_name}: use {ALTER}")
    if not exists and options.action == ALTER:
        raise CommandError(f"User {options.user} has no credential for {mechanism.mechanism_name}: use {ADD}")
    info = ScramCredentialInfo(mechanism, options.iterations or MIN_ITERATIONS)
    password = _read_password(options.password_file, options.user)
    (await admin.alter_user_scram_credentials([UserScramCredentialUpsertion(options.user, info, password)])).all()
    done = "Added" if options.action == ADD else "Altered"
    _report(options, [mechanism], f"{done} the credential of user {options.user} for {mechanism.mechanism_name}.")
    return 0


async def _delete(admin: AdminClient, options: argparse.Namespace) -> int:
    if options.mechanism is not None:
        mechanisms = [_MECHANISMS[options.mechanism]]
    else:
        mechanisms = await _mechanisms_of(admin, options.user)
        if not mechanisms:
            raise CommandError(f"User {options.user} has no credentials")
    for mechanism in mechanisms:
        # Brokers accept one alteration of a user in a request.
        (await admin.alter_user_scram_credentials([UserScramCredentialDeletion(options.user, mechanism)])).all()
    names = ", ".join(mechanism.mechanism_name for mechanism in mechanisms)
    _report(options, mechanisms, f"Deleted the credentials of user {options.user} for {names}.")
    return 0


async def _mechanisms_of(admin: AdminClient, user: str) -> list[ScramMechanism]:
    results = await admin.describe_user_scram_credentials([user])
    error = results.error(user)
    if error is not None and error.error is Errors.RESOURCE_NOT_FOUND:
        return []
    return [info.mechanism for info in results[user]]


def _read_password(file: Path | None, user: str) -> str:
    if file is None:
        password = getpass.getpass(f"Password of {user}: ")
        if password and getpass.getpass("The password again: ") != password:
            raise CommandError("The two passwords differ")
    elif file == _STANDARD_INPUT:
        password = sys.stdin.readline().rstrip("\r\n")
    else:
        password = read_text(file).partition("\n")[0].rstrip("\r")
    if not password:
        raise CommandError("The password is empty")
    return password


def _report(options: argparse.Namespace, mechanisms: Sequence[ScramMechanism], text: str) -> None:
    if options.json:
        names = [mechanism.mechanism_name for mechanism in mechanisms]
        print_json({"user": options.user, "action": options.action, "mechanisms": names})
    else:
        print(text)
