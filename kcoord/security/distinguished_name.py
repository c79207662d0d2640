# SPDX-License-Identifier: Apache-2.0
"""The distinguished name of a certificate's subject, in the form of Java's X500Principal.getName (RFC 2253).

Kafka makes principals of this form, and ssl.principal.mapping.rules are written for it. It differs from RFC 4514 in the
attributes that have a short name: an e-mail address, for example, is its number and its hexadecimal DER value.
"""

from __future__ import annotations

from cryptography import x509
from cryptography.x509.oid import NameOID

_SHORT_NAMES = {
    NameOID.COMMON_NAME: "CN",
    NameOID.COUNTRY_NAME: "C",
    NameOID.DOMAIN_COMPONENT: "DC",
    NameOID.LOCALITY_NAME: "L",
    NameOID.ORGANIZATION_NAME: "O",
    NameOID.ORGANIZATIONAL_UNIT_NAME: "OU",
    NameOID.STATE_OR_PROVINCE_NAME: "ST",
    NameOID.STREET_ADDRESS: "STREET",
    NameOID.USER_ID: "UID",
}
_ESCAPES = {character: f"\\{character}" for character in ',=+<>#;"\\'} | {"\0": "\\00"}


def subject_of(certificate: bytes) -> str:
    """Returns the subject of a certificate in DER form. The last relative name comes first."""
    subject = x509.load_der_x509_certificate(certificate).subject
    return ",".join("+".join(map(_attribute, name)) for name in reversed(subject.rdns))


def _attribute(attribute: x509.NameAttribute[str | bytes]) -> str:
    short_name = _SHORT_NAMES.get(attribute.oid)
    if short_name is None or not isinstance(attribute.value, str):
        return f"{attribute.oid.dotted_string}=#{_der_value(attribute).hex()}"
    return f"{short_name}={_escape(attribute.value)}"


def _escape(value: str) -> str:
    inner = value.strip(" ")
    leading = len(value) - len(value.lstrip(" ")) if inner else len(value)
    trailing = len(value) - leading - len(inner)
    return "\\ " * leading + "".join([_ESCAPES.get(character, character) for character in inner]) + "\\ " * trailing


def _der_value(attribute: x509.NameAttribute[str | bytes]) -> bytes:
    """Returns the value in DER form.

    A name of this attribute alone is SEQUENCE(SET(SEQUENCE(type, value))), and the type is shorter than 128 bytes.
    """
    element = x509.Name([attribute]).public_bytes()
    for _ in range(3):
        element = element[2 + (element[1] & 0x7F if element[1] & 0x80 else 0) :]
    return element[2 + element[1] :]
