# SPDX-License-Identifier: Apache-2.0
"""Names of certificates. The expected texts are those of Java 17's X500Principal.getName for the same certificates."""

from __future__ import annotations

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding
from cryptography.x509 import NameAttribute
from cryptography.x509.oid import NameOID

from kcoord.security.distinguished_name import subject_of
from tests.support.certificates import Authority

COUNTRY, ORGANIZATION, COMMON_NAME = NameOID.COUNTRY_NAME, NameOID.ORGANIZATION_NAME, NameOID.COMMON_NAME


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        ([[(COUNTRY, "DE")], [(ORGANIZATION, "Org")], [(COMMON_NAME, "Duke")]], "CN=Duke,O=Org,C=DE"),
        (
            [[(ORGANIZATION, 'A, B+C "q" <x>;=#\\')], [(COMMON_NAME, " lead and trail  ")]],
            'CN=\\ lead and trail\\ \\ ,O=A\\, B\\+C \\"q\\" \\<x\\>\\;\\=\\#\\\\',
        ),
        (
            [[(NameOID.EMAIL_ADDRESS, "a@b.c")], [(NameOID.DOMAIN_COMPONENT, "org")], [(NameOID.USER_ID, "u1")]],
            "UID=u1,DC=org,1.2.840.113549.1.9.1=#16056140622e63",
        ),
        ([[(COMMON_NAME, "a"), (NameOID.USER_ID, "b")], [(NameOID.LOCALITY_NAME, "#x")]], "L=\\#x,CN=a+UID=b"),
        ([[(NameOID.TITLE, "t" * 200)]], f"2.5.4.12=#0c81c8{'74' * 200}"),
        ([[(NameOID.STREET_ADDRESS, "s")], [(NameOID.STATE_OR_PROVINCE_NAME, "\u00fc")]], "ST=\u00fc,STREET=s"),
        ([[(COMMON_NAME, "  ")]], "CN=\\ \\ "),
        ([[(COMMON_NAME, "z\0y")]], "CN=z\\00y"),
        ([], ""),
    ],
)
def test_a_subject_has_the_form_of_java(
    authority: Authority, attributes: list[list[tuple[x509.ObjectIdentifier, str]]], text: str
) -> None:
    name = x509.Name(
        x509.RelativeDistinguishedName([NameAttribute(oid, value) for oid, value in part]) for part in attributes
    )
    assert subject_of(authority.issue(name).certificate.public_bytes(Encoding.DER)) == text
