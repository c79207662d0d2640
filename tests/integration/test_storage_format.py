# SPDX-License-Identifier: Apache-2.0
"""`kcoord storage format`, and the first users of a new cluster from kcoord.bootstrap.scram."""

from __future__ import annotations

import hmac
import json
from base64 import b64encode
from pathlib import Path

import pytest

from kcoord.cli import main
from kcoord.logtools.metadata_source import read_metadata
from kcoord.logtools.verify import FolderCheck
from kcoord.metadata.image import MetadataImage
from kcoord.metadata.records import BOOTSTRAP_FEATURES
from kcoord.storage.file_system import RealFileSystem
from tests.integration.conftest import MakeServer
from tests.integration.test_scram_credentials import drop, users
from tests.integration.test_users_command import check_password
from tests.integration.test_workers import settings
from tests.support.command_line import CommandLine
from tests.support.kcoord_process import KcoordProcess

ALICE = "SCRAM-SHA-256=[name=alice,password=apple]"
BOB = "SCRAM-SHA-512=[name=bob,iterations=8192,password=plum]"


def image_of(folder: Path) -> MetadataImage:
    return read_metadata(RealFileSystem(), str(folder / "__cluster_metadata-0")).image


def format_folder(server: KcoordProcess, *arguments: str) -> int:
    """Formats the data folder of a server that is not started yet."""
    properties = server.data.parent / "server.properties"
    properties.write_text(f"log.dirs={server.data}\nnode.id=1\n")
    return main(["storage", "format", "--config", str(properties), *arguments])


def test_a_formatted_folder_has_its_cluster_id_and_users(
    make_server: MakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server = make_server(kcoord_bootstrap_scram="SCRAM-SHA-256=[name=late,password=x]")
    assert format_folder(server, "-t", "the-cluster", "-S", ALICE, "--add-scram", BOB) == 0
    printed = capsys.readouterr()
    assert printed.out == f"Formatting metadata directory {server.data}, 2 SCRAM credentials.\n"
    assert "cluster.id=the-cluster\n" in (server.data / "meta.properties").read_text()
    image = image_of(server.data)
    assert image.features == BOOTSTRAP_FEATURES
    assert image.scram_credentials.keys() == {("SCRAM-SHA-256", "alice"), ("SCRAM-SHA-512", "bob")}
    check_password(image.scram_credentials["SCRAM-SHA-256", "alice"], "sha256", "apple")
    check_password(image.scram_credentials["SCRAM-SHA-512", "bob"], "sha512", "plum")
    assert not list(FolderCheck(RealFileSystem(), str(server.data)).run())
    server.start()
    assert users(server.port) == {"alice": 4096, "bob": 8192}
    assert "cluster the-cluster" in server.log
    assert "kcoord.bootstrap.scram has no effect: the cluster exists" in server.log


def test_a_salted_password_is_stored_as_its_keys(make_server: MakeServer) -> None:
    server = make_server()
    salt, salted = b64encode(b"grain").decode(), b64encode(b"p" * 32).decode()
    given = f'SCRAM-SHA-256=[name=eve,iterations=5000,salt="{salt}",saltedpassword="{salted}"]'
    assert format_folder(server, "--add-scram", given) == 0
    (credential,) = image_of(server.data).scram_credentials.values()
    assert (credential.salt, credential.iterations) == (b"grain", 5000)
    assert credential.server_key == hmac.new(b"p" * 32, b"Server Key", "sha256").digest()


def test_a_formatted_folder_is_refused(make_server: MakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server = make_server()
    assert format_folder(server, "-S", ALICE) == 0
    before = (server.data / "meta.properties").read_text()
    capsys.readouterr()
    assert format_folder(server, "-S", BOB) == 1
    refused = capsys.readouterr()
    assert refused.out == ""
    assert f"Log directory {server.data} is already formatted. Use --ignore-formatted" in refused.err
    assert format_folder(server, "-S", BOB, "--ignore-formatted") == 0
    assert capsys.readouterr().out == "All of the log directories are already formatted.\n"
    assert format_folder(server, "-g", "--json") == 0
    assert json.loads(capsys.readouterr().out) == {"folder": str(server.data), "formatted": False, "users": 0}
    assert (server.data / "meta.properties").read_text() == before
    assert image_of(server.data).scram_credentials.keys() == {("SCRAM-SHA-256", "alice")}


def test_failures_leave_no_formatted_folder(make_server: MakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    server = make_server()
    assert format_folder(server, "-S", "SCRAM-SHA-256=[name=alice,password=secret,iterations=1]") == 1
    printed = capsys.readouterr()
    assert "the iterations of user 'alice' are not from 4096 to 16384" in printed.err
    assert "secret" not in printed.err
    for cluster_id in ("a b", "x" * 65):
        with pytest.raises(SystemExit):
            format_folder(server, "-t", cluster_id)
        assert f"--cluster-id: '{cluster_id}' is not 1 to 64 letters, digits, - and _" in capsys.readouterr().err
    assert not server.data.exists()
    (server.data / "orders-0").mkdir(parents=True)
    assert format_folder(server) == 1
    assert "has no meta.properties, but partition folders such as orders-0" in capsys.readouterr().err
    assert [path.name for path in server.data.iterdir()] == ["orders-0"]


def test_a_new_cluster_gets_its_first_users_once(make_server: MakeServer) -> None:
    server = make_server(kcoord_bootstrap_scram=f"{ALICE},{BOB}").start()
    assert users(server.port) == {"alice": 4096, "bob": 8192}
    described = CommandLine(server.address).succeed("configs", "--describe", "--broker", "1", "--all")
    synonyms = "{STATIC_BROKER_CONFIG:kcoord.bootstrap.scram=null}"
    assert f"  kcoord.bootstrap.scram=null sensitive=true synonyms={synonyms}\n" in described.out
    assert "apple" not in described.out
    assert drop(server.port, "alice") == 0
    server.restart()
    assert users(server.port) == {"bob": 8192}
    check_password(image_of(server.data).scram_credentials["SCRAM-SHA-512", "bob"], "sha512", "plum")
    for secret in ("apple", "plum"):
        assert secret not in server.log


def test_first_users_of_several_workers(tmp_path: Path) -> None:
    process = KcoordProcess(tmp_path, {**settings(), "kcoord.bootstrap.scram": ALICE}).start()
    try:
        assert [users(port) for port in process.ports] == [{"alice": 4096}] * len(process.ports)
    finally:
        process.kill()


def test_wrong_first_users_stop_the_start(make_server: MakeServer) -> None:
    server = make_server(kcoord_bootstrap_scram="SCRAM-SHA-256=[name=alice,password=apple],SCRAM-SHA-256=[name=bob]")
    with pytest.raises(AssertionError):
        server.start()
    assert (
        "kcoord: Invalid value [hidden] for configuration kcoord.bootstrap.scram: user 'bob' needs one of password and "
        "saltedpassword"
    ) in server.log
    assert "apple" not in server.log
