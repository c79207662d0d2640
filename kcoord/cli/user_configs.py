# SPDX-License-Identifier: Apache-2.0
"""The SCRAM credentials of users for `kcoord configs`, in the form of kafka-configs.sh.

`--add-config 'SCRAM-SHA-256=[iterations=8192,password=pw]'` sets a credential. Errors do not repeat the value.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from kcoord.cli.output import print_json
from kcoord.cli.session import EXIT_FAILED, CommandError, error_text, report_failure
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.scram_credentials import (
    ScramCredentialInfo,
    UserScramCredentialDeletion,
    UserScramCredentialUpsertion,
)
from kcoord_protocol.errors import Errors
from kcoord_protocol.scram_mechanisms import MAX_ITERATIONS, MIN_ITERATIONS, ScramMechanism

MECHANISMS = {mechanism.mechanism_name: mechanism for mechanism in ScramMechanism}
_CREDENTIAL = re.compile(r"(?:iterations=(-?[0-9]{1,9}),)?password=(.*)", re.DOTALL)


async def alter_users(admin: AdminClient, user: str, settings: Mapping[str, str], removed: Iterable[str]) -> int:
    """Changes the credentials of a user. Returns the number of changes."""
    changes: list[UserScramCredentialUpsertion | UserScramCredentialDeletion] = [
        UserScramCredentialDeletion(user, _mechanism(name)) for name in removed
    ]
    changes += [_upsertion(user, name, value) for name, value in settings.items()]
    (await admin.alter_user_scram_credentials(changes)).all()
    return len(changes)


def _mechanism(name: str) -> ScramMechanism:
    mechanism = MECHANISMS.get(name)
    if mechanism is None:
        raise CommandError(f"{name}: the settings of a user are {', '.join(MECHANISMS)}")
    return mechanism


def _upsertion(user: str, name: str, value: str) -> UserScramCredentialUpsertion:
    mechanism = _mechanism(name)
    match = _CREDENTIAL.fullmatch(value)
    if match is None:
        raise CommandError(f"Invalid credential property {name}: use {name}=[iterations=N,password=PASSWORD]")
    iterations = int(match[1]) if match[1] is not None else MIN_ITERATIONS
    if iterations < MIN_ITERATIONS:
        raise CommandError(f"Iterations {iterations} is less than the minimum {MIN_ITERATIONS} required for {name}")
    if iterations > MAX_ITERATIONS:
        raise CommandError(f"Iterations {iterations} is more than the maximum {MAX_ITERATIONS} allowed for {name}")
    return UserScramCredentialUpsertion(user, ScramCredentialInfo(mechanism, iterations), match[2])


async def describe_users(
    admin: AdminClient, users: Sequence[str], entries: list[dict[str, object]], *, json: bool
) -> int:
    """Prints the credentials of these users, or of all users. A user without credentials has no line, as in Kafka.

    With `json`, `entries` come first in the list.
    """
    results = await admin.describe_user_scram_credentials(users)
    errors = {user: error for user, error in results.errors.items() if error.error is not Errors.RESOURCE_NOT_FOUND}
    configs = {
        user: {info.mechanism.mechanism_name: f"iterations={info.iterations}" for info in infos}
        for user, infos in sorted(results.values.items())
    }
    if json:
        credentials = [
            {
                "entity_type": "users",
                "entity_name": user,
                "configs": [{"name": name, "value": value} for name, value in config.items()],
            }
            for user, config in configs.items()
        ]
        print_json([*entries, *credentials])
    else:
        for user, config in configs.items():
            text = ", ".join(f"{name}={value}" for name, value in config.items())
            print(f"SCRAM credential configs for user-principal '{user}' are {text}")
    for user, error in errors.items():
        report_failure(f"{user}: {error_text(error)}")
    return EXIT_FAILED if errors else 0
