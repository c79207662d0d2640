# SPDX-License-Identifier: Apache-2.0
"""ssl.principal.mapping.rules, with the rules and names of Kafka's documentation and of its own edge cases."""

from __future__ import annotations

import pytest

from kcoord.security.principal_mapping import PrincipalMapper, PrincipalMappingError

NAME = "CN=Duke,OU=ServiceUsers,O=Org,C=US"


@pytest.mark.parametrize(
    ("rules", "name", "principal"),
    [
        ("DEFAULT", NAME, NAME),
        ("", NAME, None),
        (" , DEFAULT", NAME, NAME),
        ("RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/,DEFAULT", NAME, "Duke"),
        ("RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/U,DEFAULT", NAME, "DUKE"),
        ("RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/L,DEFAULT", NAME, "duke"),
        ("RULE:^CN=(.*?),OU=(.*?),O=(.*?),C=(.*?)$/$1@$2/L", NAME, "duke@serviceusers"),
        ("RULE:^cn=(.*?),ou=(.*?),dc=(.*?),dc=(.*?)$/$1@$2/U", "cn=zuk,ou=dept,dc=sgl,dc=com", "ZUK@DEPT"),
        ("RULE:^.*[Cc][Nn]=([a-zA-Z0-9.]*).*$/$1/L,DEFAULT", NAME, "duke"),
        ("RULE:^CN=Duke/$1/,DEFAULT", NAME, NAME),  # only a part of the name matches
        ("RULE:CN=Duke.*/x/\nRULE:.*/y/", NAME, "x"),
        ("RULE:.*a\\/b.*/slash/", "CN=a/b", "slash"),
        ("RULE:CN=(.*?),.*/$1$9/", NAME, "Duke$9"),  # there is no ninth group
        ("RULE:CN=(.*?),.*/$12/", NAME, "Duke2"),
        ("RULE:CN=(.*?),.*/\\$1/", NAME, "$1"),
        ("RULE:CN=(.*?)(X)?,OU.*/$1-$2/", NAME, "Duke-"),
        ("RULE:CN=Duke,OU=no such.*/x/", NAME, None),
        ("RULE:(?i)cn=kafka/admin/", "CN=KAFKA", "admin"),
        ("RULE:(?i)cn=kafka/admin/", "CN=\N{KELVIN SIGN}afka", None),
        (r"RULE:CN=(\w+)/$1/", "CN=\N{CYRILLIC SMALL LETTER A}dmin", None),
        (r"RULE:CN=(\d+)/$1/", "CN=\N{ARABIC-INDIC DIGIT ONE}", None),
    ],
)
def test_the_first_rule_that_matches_the_whole_name_decides(rules: str, name: str, principal: str | None) -> None:
    mapper = PrincipalMapper(rules)
    if principal is None:
        with pytest.raises(PrincipalMappingError, match="No rules apply to"):
            mapper.name_of(name)
    else:
        assert mapper.name_of(name) == principal


@pytest.mark.parametrize(
    "rules",
    [
        "default",
        "DEFAULTS",
        "DEFAULT/L",
        "DEFAULT/",
        "RULE:CN=(.*?),OU=ServiceUsers.*/$1",
        "rule:^CN=(.*?),OU=ServiceUsers.*$/$1/L",
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/$1/LU",
        "RULE:^CN=(.*?),OU=ServiceUsers.*$/L",
        "RULE:(/x/",
        "RULE:CN=[a-z&&[^b]]/x/",
        "RULE:CN=[[a]b]/x/",
        "DEFAULT,RULE:^CN=(.*?)/$1/l",
    ],
)
def test_an_invalid_rule_is_refused(rules: str) -> None:
    with pytest.raises(PrincipalMappingError, match="Invalid rule"):
        PrincipalMapper(rules)
