# SPDX-License-Identifier: Apache-2.0
"""`kcoord configs` for users, clients and ips: client quotas and SCRAM credentials, in the form of kafka-configs.sh.

An entity is a user, a client id, a user with a client id, or an ip. An empty name is the default of its type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from typing import Final

from kcoord.cli.output import print_json
from kcoord.cli.session import CommandError
from kcoord.cli.user_configs import MECHANISMS, alter_users, describe_users
from kcoord.client.admin.client import AdminClient
from kcoord.client.admin.client_quotas import ClientQuotaEntity
from kcoord.metadata.client_quotas import CLIENT_ID, CLIENT_KEYS, IP, IP_KEYS, USER

USERS: Final = "users"
CLIENTS: Final = "clients"
IPS: Final = "ips"
ENTITY_TYPES: Final = {USERS: USER, CLIENTS: CLIENT_ID, IPS: IP}
"""The types that have quotas, and their names in the protocol."""
_SHOWN: Final = {USER: "user-principal", CLIENT_ID: "client-id", IP: "ip"}

_LEAST_PLAIN: Final = 1e-3
_LEAST_SCIENTIFIC: Final = 1e7


async def alter_entity(
    admin: AdminClient, types: Sequence[str], names: Sequence[str], settings: Mapping[str, str], removed: Sequence[str]
) -> int:
    """Changes the quotas of an entity, or the credentials of a user. Returns the number of changes."""
    _check_keys(types, settings, "added")
    _check_keys(types, removed, "deleted")
    scram = [key for key in (*settings, *removed) if key in MECHANISMS]
    if not scram:
        return await _alter_quotas(admin, types, names, settings, removed)
    if "" in names:
        raise CommandError("The use of --entity-default or --user-defaults is not allowed with User SCRAM Credentials")
    if len(scram) < len(settings) + len(removed):
        raise CommandError("Cannot alter both quota and SCRAM credential configs simultaneously for 'users'")
    return await alter_users(admin, names[0], settings, removed)


def _check_keys(types: Sequence[str], keys: Iterable[str], verb: str) -> None:
    """Raises CommandError if an entity of these types has no such config."""
    if types[0] == IPS:
        allowed, kind = IP_KEYS, "connection quota configs"
    elif CLIENTS in types:
        allowed, kind = CLIENT_KEYS, "quota configs"
    else:
        allowed, kind = CLIENT_KEYS | MECHANISMS.keys(), "quota and SCRAM credential configs"
    unknown = [key for key in keys if key not in allowed]
    if unknown:
        shown = CLIENTS if CLIENTS in types else types[0]
        raise CommandError(f"Only {kind} can be {verb} for '{shown}'. Unexpected config names: {', '.join(unknown)}")


async def _alter_quotas(
    admin: AdminClient, types: Sequence[str], names: Sequence[str], settings: Mapping[str, str], removed: Sequence[str]
) -> int:
    entity = ClientQuotaEntity.of({ENTITY_TYPES[kind]: name or None for kind, name in zip(types, names, strict=True)})
    values: dict[str, float | None] = {key: _value(key, text) for key, text in settings.items()}
    if removed:
        current = (await admin.describe_client_quotas()).get(entity, {})
        missing = [key for key in removed if key not in current]
        if missing:
            raise CommandError(f"Invalid config(s): {','.join(missing)}")
        values.update(dict.fromkeys(removed))
    (await admin.alter_client_quotas({entity: values})).all()
    return len(values)


def _value(key: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise CommandError(f"Cannot parse quota configuration value for {key}: {text}") from None


async def describe_entities(admin: AdminClient, types: Sequence[str], names: Sequence[str], *, json: bool) -> int:
    """Prints the quotas of all entities that have these types, and the names if there are any.

    Without clients and defaults, the SCRAM credentials of the users follow.
    """
    asked = dict(zip((ENTITY_TYPES[kind] for kind in types), (*names, None), strict=False))
    quotas = {
        entity: values
        for entity, values in (await admin.describe_client_quotas()).items()
        if _matches(dict(entity.names), [ENTITY_TYPES[kind] for kind in types], asked)
    }
    shown = sorted(quotas, key=lambda entity: [(kind, name or "") for kind, name in entity.names])
    if not json:
        for entity in shown:
            values = ", ".join(f"{key}={double_text(value)}" for key, value in sorted(quotas[entity].items()))
            print(f"Quota configs for {_title(dict(entity.names))} are {values}")
    entries = [_entry(entity, quotas[entity]) for entity in shown]
    if types == [USERS] and "" not in names:
        return await describe_users(admin, names, entries, json=json)
    if json:
        print_json(entries)
    return 0


def _matches(entity: Mapping[str, str | None], types: Sequence[str], asked: Mapping[str, str | None]) -> bool:
    """Returns whether an entity has exactly these types, and the names that were asked for."""
    return entity.keys() == set(types) and all(
        name is None or entity[entity_type] == (name or None) for entity_type, name in asked.items()
    )


def _title(entity: Mapping[str, str | None]) -> str:
    """Returns the name of an entity in Kafka's words, the user first."""
    parts = [(shown, entity[kind]) for kind, shown in _SHOWN.items() if kind in entity]
    return ", ".join(f"the default {shown}" if name is None else f"{shown} '{name}'" for shown, name in parts)


def _entry(entity: ClientQuotaEntity, values: Mapping[str, float]) -> dict[str, object]:
    names = dict(entity.names)
    return {
        "entity": {kind: names[entity_type] for kind, entity_type in ENTITY_TYPES.items() if entity_type in names},
        "quotas": dict(sorted(values.items())),
    }


def double_text(value: float) -> str:
    """Returns a number as Java prints it."""
    if _LEAST_PLAIN <= abs(value) < _LEAST_SCIENTIFIC or not value:
        return repr(value)
    mantissa, _, exponent = f"{Decimal(repr(value)).normalize():E}".partition("E")
    return f"{mantissa if '.' in mantissa else mantissa + '.0'}E{int(exponent)}"
