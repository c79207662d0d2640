# SPDX-License-Identifier: Apache-2.0
"""The JAAS line: what Kafka accepts, what is refused, and that no value shows."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.security.jaas import PLAIN_MODULE, JaasError, LoginModule, parse_login_module

SECRET = "s3cret"


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ('M required username="a" password="b";', {"username": "a", "password": "b"}),
        ("M required username='a' password=b ;", {"username": "a", "password": "b"}),
        ("M required;", {}),
        ('  M\n  REQUIRED\n  user_alice = "pw"\n;\n', {"user_alice": "pw"}),
        (r'M optional a="with \"quotes\" and \\ and \'";', {"a": 'with "quotes" and \\ and \''}),
        (r'M required a="\t\n\101\60";', {"a": "\t\nA0"}),
        ('M required a="; = // /* \'";', {"a": "; = // /* '"}),
        ('M required a="" b=\'"\';', {"a": "", "b": '"'}),
        ('M required // password="x"\n a="b" /* c="d"; */;', {"a": "b"}),
        ('M required "quoted name"="v";', {"quoted name": "v"}),
        ('M required user_müller="größe";', {"user_müller": "größe"}),
    ],
)
def test_valid_lines(line: str, options: dict[str, str]) -> None:
    assert parse_login_module(line) == LoginModule("M", options)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "there is no login module"),
        ("// only a comment", "there is no login module"),
        ("; M required;", "there is no login module"),
        ("M", "must be followed by one of required, requisite"),
        ("M;", "must be followed by one of"),
        ('M username="a";', "must be followed by one of"),
        ('M required password="s3cret"', "must end with a semicolon"),
        ("M required password=s3cret", "must end with a semicolon"),
        ("M required password s3cret;", "no '=' after option 1"),
        ("M required a=b password=;", "option 2 has no value"),
        ("M required a=b password==s3cret;", "option 2 has no value"),
        ("M required =s3cret;", "no name of an option"),
        ("M required a=s3cret a=s3cret;", "option 2 occurs twice"),
        ("M required a=b; M required;", "one login module only"),
        ("M required a=b;;", "one login module only"),
        ('M required password="s3cret;', "the quote of character 21 has no end"),
        ('M required password="s3cret\n";', "the quote of character 21 has no end"),
        ("M required password=s3cret/s3cret;", "a slash begins a comment .character 27.; put a value with a slash in"),
        ("M required password=a /* s3cret;", "a slash begins a comment"),
    ],
)
def test_refused_lines(line: str, problem: str) -> None:
    with pytest.raises(JaasError, match=problem) as caught:
        parse_login_module(line)
    assert SECRET not in str(caught.value)


def test_options_are_not_shown() -> None:
    module = parse_login_module(f'{PLAIN_MODULE} required password="{SECRET}";')
    assert repr(module) == f"LoginModule('{PLAIN_MODULE}')"


@given(
    st.dictionaries(st.from_regex(r"[A-Za-z_]{1,8}", fullmatch=True), st.text(st.characters(exclude_characters="\r\n")))
)
def test_quoted_values_are_read_back(options: dict[str, str]) -> None:
    quoted = [name + '="' + value.replace("\\", "\\\\").replace('"', '\\"') + '"' for name, value in options.items()]
    assert parse_login_module(" ".join(["M required", *quoted, ";"])).options == options


@given(st.text(alphabet="M required=\"';/*\\\n ab", max_size=40))
def test_any_text_is_a_module_or_an_error(text: str) -> None:
    with suppress(JaasError):
        parse_login_module(text)
