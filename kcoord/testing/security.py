# SPDX-License-Identifier: Apache-2.0
"""TLS, users and ACLs of a test broker: the settings of the broker, and the settings with which clients connect.

The clients have a listener of their own, CLIENTS. The control of the broker uses another one, CONTROL, which is plain.
The authority that certifies the broker's key exists for this broker only. So a client that connects has checked the
certificate, and no file is written.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, Literal

from kcoord.config import ConfigError
from kcoord.config.principals import SUPER_USERS
from kcoord.config.security import STANDARD_AUTHORIZER
from kcoord_protocol.acls import CLUSTER_NAME, WILDCARD, Acl, AclOperation, PatternType, PermissionType, ResourceType

if TYPE_CHECKING:
    from kcoord.testing.certificates import Authority, IssuedKey

Tls = Literal["mutual"] | bool
"""Whether clients connect with TLS. If it is "mutual", they need a certificate."""
Mechanism = Literal["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]
"""A SASL mechanism with which each user can log in."""

CLIENTS: Final = "CLIENTS"
CONTROL: Final = "CONTROL"
_CONTROL_PRINCIPAL: Final = "User:kcoord-control"
_AUTHORIZER: Final = "authorizer.class.name"
_OPERATIONS: Final = {operation.title.lower(): operation for operation in AclOperation}
_MECHANISMS: Final[tuple[Mechanism, ...]] = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
_MODULES: Final[Mapping[Mechanism, str]] = {
    "PLAIN": "org.apache.kafka.common.security.plain.PlainLoginModule",
    "SCRAM-SHA-256": "org.apache.kafka.common.security.scram.ScramLoginModule",
    "SCRAM-SHA-512": "org.apache.kafka.common.security.scram.ScramLoginModule",
}
_NAME: Final = re.compile(r"[A-Za-z0-9._-]+")
_PASSWORD: Final = re.compile(r'[^",\[\]=\\\s]+')
"""Without the characters that have a meaning in the settings of users."""
_MUTUAL: Final = "mutual"
_CLIENT: Final = "client"
"""The name in the certificate of a client whose user is not given."""


@dataclass(slots=True, frozen=True)
class BrokerSecurity:
    """What protects the listener of the clients.

    `authority` certifies the keys of the broker and of its clients, None without TLS. If `is_mutual`, clients show a
    certificate. `users` maps names to passwords; if it is empty, clients do not log in. `acls` are those of a new
    broker; if it is None, clients may do everything.
    """

    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    authority: Authority | None = field(default=None, repr=False)
    is_mutual: bool = False
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    acls: tuple[Acl, ...] | None = None

    @property
    def protocol(self) -> str:
        """The value of security.protocol."""
        transport = "PLAINTEXT" if self.authority is None else "SSL"
        return f"SASL_{transport}" if self.users else transport

    def kafka_properties(self, user: str | None, mechanism: Mechanism) -> dict[str, str]:
        """Returns the settings of kcoord.client, of Java's clients and of Kafka's tools."""
        properties = {"security.protocol": self.protocol}
        if self.authority is not None:
            properties |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": self.authority.pem}
        if (identity := self._identity(user)) is not None:
            properties |= {
                "ssl.keystore.type": "PEM",
                "ssl.keystore.key": identity.key_pem,
                "ssl.keystore.certificate.chain": identity.chain_pem,
            }
        if self.users:
            name, password = self._login(user, mechanism)
            properties["sasl.mechanism"] = mechanism
            properties["sasl.jaas.config"] = f'{_MODULES[mechanism]} required username="{name}" password="{password}";'
        return properties

    def librdkafka_properties(self, user: str | None, mechanism: Mechanism) -> dict[str, str]:
        """Returns the settings of librdkafka."""
        properties = {"security.protocol": self.protocol}
        if self.authority is not None:
            properties["ssl.ca.pem"] = self.authority.pem
        if (identity := self._identity(user)) is not None:
            properties |= {"ssl.key.pem": identity.key_pem, "ssl.certificate.pem": identity.chain_pem}
        if self.users:
            name, password = self._login(user, mechanism)
            properties |= {"sasl.mechanism": mechanism, "sasl.username": name, "sasl.password": password}
        return properties

    def python_arguments(self, user: str | None, mechanism: Mechanism) -> dict[str, object]:
        """Returns the keyword arguments of kafka-python and aiokafka."""
        arguments: dict[str, object] = {"security_protocol": self.protocol}
        if self.authority is not None:
            # Most test brokers have no TLS, and do not load what certificates need.
            from kcoord.security.tls import TlsSettings, client_context

            arguments["ssl_context"] = client_context(TlsSettings(self.kafka_properties(user, mechanism), {}))
        if self.users:
            name, password = self._login(user, mechanism)
            arguments |= {
                "sasl_mechanism": mechanism,
                "sasl_plain_username": name,
                "sasl_plain_password": password,
            }
        return arguments

    def _identity(self, user: str | None) -> IssuedKey | None:
        """Returns the key and certificate of a client, None if it needs none."""
        if self.authority is None or not self.is_mutual:
            return None
        return self.authority.client(user or next(iter(self.users), _CLIENT))

    def _login(self, user: str | None, mechanism: Mechanism) -> tuple[str, str]:
        """Returns the name and the password of `user`, None for the first one. Raises ValueError if there is none."""
        name = next(iter(self.users)) if user is None else user
        if name not in self.users:
            raise ValueError(f"there is no user {name!r}: the users are {', '.join(self.users)}")
        if mechanism not in _MECHANISMS:
            raise ValueError(f"the mechanism {mechanism!r} is not one of {', '.join(_MECHANISMS)}")
        return name, self.users[name]


def allow(
    user: str,
    operation: str,
    *,
    topic: str | None = None,
    group: str | None = None,
    transactional_id: str | None = None,
    cluster: bool = False,
    prefixed: bool = False,
) -> Acl:
    """Returns an ACL that allows a user an operation on one resource, from every host.

    `operation` is a name such as "Read", "Write", "Describe" or "All". `user` and the name of the resource may be "*".
    With `prefixed` the name is a prefix. For all other ACLs use `kcoord_protocol.acls.Acl`.
    """
    names = {
        ResourceType.TOPIC: topic,
        ResourceType.GROUP: group,
        ResourceType.TRANSACTIONAL_ID: transactional_id,
        ResourceType.CLUSTER: CLUSTER_NAME if cluster else None,
    }
    resources = [(kind, name) for kind, name in names.items() if name is not None]
    if len(resources) != 1:
        raise ValueError("an ACL is for one resource: give one of topic, group, transactional_id and cluster")
    ((kind, name),) = resources
    if operation.lower() not in _OPERATIONS:
        raise ValueError(f"the operation {operation!r} is not one of {', '.join(sorted(_OPERATIONS))}")
    pattern = PatternType.PREFIXED if prefixed else PatternType.LITERAL
    return Acl(kind, name, pattern, f"User:{user}", WILDCARD, _OPERATIONS[operation.lower()], PermissionType.ALLOW)


def secure(
    config: Mapping[str, str],
    *,
    tls: Tls = False,
    users: Mapping[str, str] | None = None,
    acls: Iterable[Acl] | None = None,
) -> BrokerSecurity:
    """Returns the security of a broker with the settings `config`, nothing if there are no TLS, users and ACLs.

    Raises ConfigError if a user cannot be written into the settings, or if `config` has listeners of its own.
    """
    users = users or {}
    if tls not in (False, True, _MUTUAL):
        raise ConfigError(f'tls={tls!r} is not one of False, True and "{_MUTUAL}"')
    if not tls and not users and acls is None:
        return BrokerSecurity()
    if "listeners" in config:
        raise ConfigError("tls, users and acls choose the listeners of the broker: leave `listeners` out of the config")
    for name, password in users.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"the name of the user {name!r} must have letters, digits, '.', '_' and '-' only")
        if not _PASSWORD.fullmatch(password):
            raise ConfigError(
                f"the password of {name} must have a character, and no space, quote, comma, [, ], = or \\"
            )
    authority = None
    settings = {"listeners": f"{CLIENTS}://127.0.0.1:0,{CONTROL}://127.0.0.1:0"}
    if tls:
        from kcoord.testing.certificates import Authority

        authority = Authority()
        identity = authority.new_server()
        settings["ssl.keystore.type"] = "PEM"
        settings["ssl.keystore.key"] = identity.key_pem
        settings["ssl.keystore.certificate.chain"] = identity.chain_pem
    if authority is not None and tls == _MUTUAL:
        settings["ssl.truststore.type"] = "PEM"
        settings["ssl.truststore.certificates"] = authority.pem
        # With SASL only the key of the listener counts.
        settings[f"listener.name.{CLIENTS.lower()}.ssl.client.auth"] = "required"
        settings["ssl.principal.mapping.rules"] = "RULE:^CN=(.*)$/$1/"
    if users:
        options = " ".join(f'user_{name}="{password}"' for name, password in users.items())
        settings["sasl.enabled.mechanisms"] = ",".join(_MECHANISMS)
        settings[f"listener.name.{CLIENTS.lower()}.plain.sasl.jaas.config"] = f"{_MODULES['PLAIN']} required {options};"
        settings["kcoord.bootstrap.scram"] = ",".join(
            f"{mechanism}=[name={name},password={password}]"
            for name, password in users.items()
            for mechanism in _MECHANISMS
            if mechanism != "PLAIN"
        )
    if acls is not None:
        settings[_AUTHORIZER] = STANDARD_AUTHORIZER
    if acls is not None or _AUTHORIZER in config:
        settings["kcoord.listener.principals"] = f"{CONTROL}={_CONTROL_PRINCIPAL}"
        settings[SUPER_USERS] = ";".join(filter(None, (config.get(SUPER_USERS), _CONTROL_PRINCIPAL)))
    security = BrokerSecurity(settings, authority, tls == _MUTUAL, dict(users), None if acls is None else tuple(acls))
    settings["listener.security.protocol.map"] = f"{CLIENTS}:{security.protocol},{CONTROL}:PLAINTEXT"
    return security
