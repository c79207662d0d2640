# SPDX-License-Identifier: Apache-2.0
"""`kcoord users`, and `kcoord configs` for users: passwords from files, standard input and the terminal."""

from __future__ import annotations

import hashlib
import hmac
import json
from pathlib import Path
from unittest import mock

import pytest

from kcoord.logtools.metadata_source import read_metadata
from kcoord.metadata.image import ScramCredential
from kcoord.storage.file_system import RealFileSystem
from tests.support.command_line import CommandLine, rows
from tests.support.kcoord_process import KcoordProcess


@pytest.fixture
def kcoord(server: KcoordProcess) -> CommandLine:
    return CommandLine(server.address)


def check_password(credential: ScramCredential, hash_name: str, password: str) -> None:
    """Checks that the credential was made of the password."""
    salted = hashlib.pbkdf2_hmac(hash_name, password.encode(), credential.salt, credential.iterations)
    assert credential.server_key == hmac.new(salted, b"Server Key", hash_name).digest()
    client_key = hmac.new(salted, b"Client Key", hash_name).digest()
    assert credential.stored_key == hashlib.new(hash_name, client_key).digest()


def test_a_credential_from_its_first_password_to_its_end(
    server: KcoordProcess, kcoord: CommandLine, tmp_path: Path
) -> None:
    word = tmp_path / "word"
    word.write_text("wörd\r\nnot this line\n")
    first = kcoord.succeed("users", "add", "--user", "ann", "--password-file", str(word))
    assert first.out == "Added the credential of user ann for SCRAM-SHA-512.\n"
    options = ["--user", "ann", "--mechanism", "SCRAM-SHA-256", "--iterations", "8192", "--password-file", "-"]
    kcoord.succeed("users", "add", *options, stdin="first\n")
    altered = kcoord.succeed("users", "alter", *options, stdin="second\n")
    assert altered.out == "Altered the credential of user ann for SCRAM-SHA-256.\n"
    assert rows(kcoord.succeed("users", "list").out, "USER") == [
        {"USER": "ann", "MECHANISM": "SCRAM-SHA-256", "ITERATIONS": "8192"},
        {"USER": "ann", "MECHANISM": "SCRAM-SHA-512", "ITERATIONS": "4096"},
    ]
    described = kcoord.succeed("users", "describe", "--user", "ann", "--json").json
    assert described == [
        {"user": "ann", "mechanism": "SCRAM-SHA-256", "iterations": 8192},
        {"user": "ann", "mechanism": "SCRAM-SHA-512", "iterations": 4096},
    ]
    credentials = read_metadata(RealFileSystem(), str(server.data / "__cluster_metadata-0")).image.scram_credentials
    check_password(credentials["SCRAM-SHA-512", "ann"], "sha512", "wörd")
    check_password(credentials["SCRAM-SHA-256", "ann"], "sha256", "second")
    deleted = kcoord.succeed("users", "delete", "--user", "ann")
    assert deleted.out == "Deleted the credentials of user ann for SCRAM-SHA-256, SCRAM-SHA-512.\n"
    assert kcoord.succeed("users", "list").out == ""


def test_failures(kcoord: CommandLine) -> None:
    kcoord.succeed("users", "add", "--user", "ann", "--password-file", "-", stdin="word")
    for arguments, stdin, text in (
        (["add", "--user", "ann", "--password-file", "-"], "word", "already has a credential for SCRAM-SHA-512"),
        (["alter", "--user", "bob", "--password-file", "-"], "word", "has no credential for SCRAM-SHA-512: use add"),
        (["add", "--user", "bob", "--password-file", "-"], "\n", "The password is empty"),
        (["add", "--user", "bob", "--password-file", "absent"], "", "absent"),
        (["delete", "--user", "bob"], "", "User bob has no credentials"),
        (["delete", "--user", "ann", "--mechanism", "SCRAM-SHA-256"], "", "credential that does not exist"),
        (["describe", "--user", "bob"], "", "RESOURCE_NOT_FOUND"),
    ):
        refused = kcoord.run("users", *arguments, stdin=stdin)
        assert (refused.code, refused.out) == (1, "")
        assert text in refused.err


def test_the_terminal_asks_twice(kcoord: CommandLine) -> None:
    with mock.patch("getpass.getpass", side_effect=["word", "wort", "word", "word", ""]):
        differs = kcoord.run("users", "add", "--user", "ann")
        kcoord.succeed("users", "add", "--user", "ann")
        empty = kcoord.run("users", "add", "--user", "bob")
    assert "The two passwords differ" in differs.err
    assert "The password is empty" in empty.err
    deleted = json.loads(kcoord.succeed("users", "delete", "--user", "ann", "--json").out)
    assert deleted == {"user": "ann", "action": "delete", "mechanisms": ["SCRAM-SHA-512"]}


def test_configs_of_users_repeat_no_password(kcoord: CommandLine) -> None:
    changed = kcoord.succeed("configs", "--alter", "--user", "ann", "--add-config", "SCRAM-SHA-512=[password=a,b=c]")
    assert changed.out == "Completed updating config for user ann.\n"
    described = kcoord.succeed("configs", "--describe", "--user", "ann", "--json").json
    entry = {"name": "SCRAM-SHA-512", "value": "iterations=4096"}
    assert described == [{"entity_type": "users", "entity_name": "ann", "configs": [entry]}]
    for setting, text in (
        ("SCRAM-SHA-256=[pass=secret]", "Invalid credential property SCRAM-SHA-256"),
        ("SCRAM-SHA-256=[iterations=x,password=secret]", "Invalid credential property SCRAM-SHA-256"),
        ("SCRAM-SHA-256=[iterations=20000,password=secret]", "is more than the maximum 16384"),
        ("SCRAM-SHA-1=[password=secret]", "Unexpected config names: SCRAM-SHA-1"),
    ):
        refused = kcoord.run("configs", "--alter", "--user", "ann", "--add-config", setting)
        assert refused.code == 1
        assert text in refused.err
        assert "secret" not in refused.err
    removed = kcoord.succeed("configs", "--alter", "--user", "ann", "--delete-config", "SCRAM-SHA-512", "--json")
    assert '"changed": 1' in removed.out
