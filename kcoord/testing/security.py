# SPDX-License-Identifier: Apache-2.0
"""TLS, users and ACLs of a test broker: the settings of the broker, and the settings with which clients connect.

The clients have a listener of their own, CLIENTS. The control of the broker uses another one, CONTROL, which is plain.
The authority that certifies the broker's key exists for this broker only. So a client that connects has checked the
certificate, and no file is written.
"""

from __future__ import annotations

import datetime
import ipaddress
import re
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

from kcoord.config import ConfigError
from kcoord.config.principals import SUPER_USERS
from kcoord.config.security import STANDARD_AUTHORIZER
from kcoord_protocol.acls import CLUSTER_NAME, WILDCARD, Acl, AclOperation, PatternType, PermissionType, ResourceType

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
_DAY: Final = datetime.timedelta(days=1)
_DAYS_VALID: Final = 30


@dataclass(slots=True, frozen=True)
class BrokerSecurity:
    """What protects the listener of the clients.

    `authority_pem` is the certificate of the authority, None without TLS. `users` maps names to passwords; if it is
    empty, clients do not log in. `acls` are those of a new broker; if it is None, clients may do everything.
    """

    settings: Mapping[str, str] = field(default_factory=dict, repr=False)
    authority_pem: str | None = None
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    acls: tuple[Acl, ...] | None = None

    @property
    def protocol(self) -> str:
        """The value of security.protocol."""
        transport = "PLAINTEXT" if self.authority_pem is None else "SSL"
        return f"SASL_{transport}" if self.users else transport

    def kafka_properties(self, user: str | None, mechanism: Mechanism) -> dict[str, str]:
        """Returns the settings of kcoord.client, of Java's clients and of Kafka's tools."""
        properties = {"security.protocol": self.protocol}
        if self.authority_pem is not None:
            properties |= {"ssl.truststore.type": "PEM", "ssl.truststore.certificates": self.authority_pem}
        if self.users:
            name, password = self._login(user, mechanism)
            properties["sasl.mechanism"] = mechanism
            properties["sasl.jaas.config"] = f'{_MODULES[mechanism]} required username="{name}" password="{password}";'
        return properties

    def librdkafka_properties(self, user: str | None, mechanism: Mechanism) -> dict[str, str]:
        """Returns the settings of librdkafka."""
        properties = {"security.protocol": self.protocol}
        if self.authority_pem is not None:
            properties["ssl.ca.pem"] = self.authority_pem
        if self.users:
            name, password = self._login(user, mechanism)
            properties |= {"sasl.mechanism": mechanism, "sasl.username": name, "sasl.password": password}
        return properties

    def python_arguments(self, user: str | None, mechanism: Mechanism) -> dict[str, object]:
        """Returns the keyword arguments of kafka-python and aiokafka."""
        arguments: dict[str, object] = {"security_protocol": self.protocol}
        if self.authority_pem is not None:
            arguments["ssl_context"] = ssl.create_default_context(cadata=self.authority_pem)
        if self.users:
            name, password = self._login(user, mechanism)
            arguments |= {
                "sasl_mechanism": mechanism,
                "sasl_plain_username": name,
                "sasl_plain_password": password,
            }
        return arguments

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
    tls: bool = False,
    users: Mapping[str, str] | None = None,
    acls: Iterable[Acl] | None = None,
) -> BrokerSecurity:
    """Returns the security of a broker with the settings `config`, nothing if there are no TLS, users and ACLs.

    Raises ConfigError if a user cannot be written into the settings, or if `config` has listeners of its own.
    """
    users = users or {}
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
    authority_pem = None
    settings = {"listeners": f"{CLIENTS}://127.0.0.1:0,{CONTROL}://127.0.0.1:0"}
    if tls:
        authority_pem, key_pem, chain_pem = _new_certificate()
        settings["ssl.keystore.type"] = "PEM"
        settings["ssl.keystore.key"] = key_pem
        settings["ssl.keystore.certificate.chain"] = chain_pem
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
    security = BrokerSecurity(settings, authority_pem, dict(users), None if acls is None else tuple(acls))
    settings["listener.security.protocol.map"] = f"{CLIENTS}:{security.protocol},{CONTROL}:PLAINTEXT"
    return security


def _new_certificate() -> tuple[str, str, str]:
    """Returns a new authority, and a key for this machine with the certificate of that authority, as PEM."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import NameOID

    def name_of(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def builder(subject: str, key: ec.EllipticCurvePrivateKey, *, ca: bool) -> x509.CertificateBuilder:
        # Clients that check strictly want both key identifiers.
        own, issuers = x509.SubjectKeyIdentifier, x509.AuthorityKeyIdentifier
        return (
            x509.CertificateBuilder()
            .subject_name(name_of(subject))
            .issuer_name(name_of(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAYS_VALID * _DAY)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(own.from_public_key(key.public_key()), critical=False)
            .add_extension(issuers.from_issuer_public_key(issuer_key.public_key()), critical=False)
        )

    now = datetime.datetime.now(datetime.UTC)
    issuer = "kcoord.testing"
    issuer_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    authority = builder(issuer, issuer_key, ca=True).sign(issuer_key, hashes.SHA256())
    names = x509.SubjectAlternativeName(
        [
            x509.DNSName("localhost"),
            x509.IPAddress(ipaddress.ip_address("127.0.0.1")),
            x509.IPAddress(ipaddress.ip_address("::1")),
        ]
    )
    certificate = (
        builder("localhost", key, ca=False).add_extension(names, critical=False).sign(issuer_key, hashes.SHA256())
    )
    authority_pem = authority.public_bytes(Encoding.PEM).decode()
    key_pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()
    return authority_pem, key_pem, certificate.public_bytes(Encoding.PEM).decode() + authority_pem
