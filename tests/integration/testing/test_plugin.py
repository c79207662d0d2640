# SPDX-License-Identifier: Apache-2.0
"""The pytest plugin in a project that has kcoord installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

INI = "[pytest]\n"
UNNEEDED = ("-p", "no:hypothesispytest", "-p", "no:xdist", "-p", "no:asyncio")
"""Options that turn off plugins with a slow import."""


def run(folder: Path, test: str, *options: str, ini: str = "") -> str:
    (folder / "pytest.ini").write_text(INI + ini)
    (folder / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *UNNEEDED, *options]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300)
    return ran.stdout + ran.stderr


def test_settings_from_the_ini_file_a_fixture_and_a_marker(tmp_path: Path) -> None:
    test = """
import pytest
from kcoord.testing import Record

@pytest.fixture
def kcoord_broker_config():
    return {"num.partitions": "3"}

def test_fixture_wins_over_ini(kcoord_broker):
    kcoord_broker.create_topic("t", -1)
    assert kcoord_broker.produce("t", [Record("x", partition=2)]) == [(2, 0)]
    assert kcoord_broker.control_url is None
    kcoord_broker.commit("g", {"t": {0: 1}})
    kcoord_broker.advance_clock(7200)
    assert kcoord_broker.committed("g") == {}

@pytest.mark.kcoord(config={"num.partitions": "4"}, mode="process")
def test_marker_wins_over_all(kcoord_broker):
    kcoord_broker.create_topic("t", -1)
    assert kcoord_broker.produce("t", [Record("x", partition=3)]) == [(3, 0)]
    assert kcoord_broker.control_url.startswith("http://127.0.0.1:")
"""
    said = run(tmp_path, test, ini="kcoord_config =\n    num.partitions=2\n    offsets.retention.minutes=60\n")
    assert "2 passed" in said, said


def test_processes_for_all_by_an_option(tmp_path: Path) -> None:
    test = """
seen = set()

def test_one(kcoord_broker):
    kcoord_broker.create_topic("t")
    seen.add((kcoord_broker.control_url, kcoord_broker.port))

def test_two(kcoord_broker):
    kcoord_broker.create_topic("t")
    seen.add((kcoord_broker.control_url, kcoord_broker.port))
    assert len({url for url, _ in seen}) == 1, "both tests use the same process"
    assert len({port for _, port in seen}) == 2, "each test has its own port"
"""
    assert "2 passed" in run(tmp_path, test, "--kcoord-broker=process")


def test_the_marker_secures_the_brokers_of_a_test(tmp_path: Path) -> None:
    test = """
import pytest

@pytest.mark.kcoord(tls=True, users={"alice": "apple-pie"})
def test_marker(kcoord_broker, kcoord_broker_factory):
    assert kcoord_broker.security.protocol == "SASL_SSL"
    brokers = [kcoord_broker_factory(), kcoord_broker_factory(users={}), kcoord_broker_factory(tls=False, users={})]
    assert [broker.security.protocol for broker in brokers] == ["SASL_SSL", "SSL", "PLAINTEXT"]

def test_plain(kcoord_broker):
    assert kcoord_broker.security.protocol == "PLAINTEXT"
"""
    assert "2 passed" in run(tmp_path, test)
    assert "2 passed" in run(tmp_path, test, "--kcoord-broker=process")


def test_wrong_settings_are_errors(tmp_path: Path) -> None:
    test = """
import pytest

@pytest.mark.kcoord(config={"num.partition": "4"})
def test_key(kcoord_broker):
    pass

@pytest.mark.kcoord(mode="thread")
def test_mode(kcoord_broker):
    pass
"""
    said = run(tmp_path, test)
    assert "2 errors" in said
    assert "unknown settings: num.partition" in said
    assert "kcoord_broker must be in-process or process, not 'thread'" in said
    assert "'nonsense' is not KEY=VALUE" in run(tmp_path, test, ini="kcoord_config = nonsense\n")


def test_the_plugin_imports_nothing_before_its_first_use(tmp_path: Path) -> None:
    test = """
import sys

def test_nothing_is_imported():
    assert "kcoord.pytest_plugin" in sys.modules
    assert not {"kcoord.testing", "kcoord.server", "kcoord.client", "kcoord_protocol"} & sys.modules.keys()
"""
    assert "1 passed" in run(tmp_path, test)
