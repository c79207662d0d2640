# SPDX-License-Identifier: Apache-2.0
"""The distribution: both packages are imported from this folder; lock files pin every dependency and name no host."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

import kcoord
import kcoord_protocol

ROOT = Path(__file__).parents[2]
LOCKS = sorted((ROOT / "requirements").glob("*.lock"))


def test_both_packages_are_imported_from_this_folder() -> None:
    assert Path(kcoord_protocol.__file__ or "").parent == ROOT / "protocol" / "kcoord_protocol"
    assert Path(kcoord.__file__ or "").parent == ROOT / "kcoord"


@pytest.mark.parametrize("lock", LOCKS, ids=lambda lock: lock.stem)
def test_lock_files_have_hashes_and_no_hosts(lock: Path) -> None:
    text = lock.read_text()
    assert "://" not in text
    assert not re.search(r"^-", text, re.MULTILINE), "the file has an option, such as an index"
    requirements = re.findall(r"^[a-z0-9].*?(?=^[a-z0-9]|\Z)", text, re.MULTILINE | re.DOTALL)
    assert requirements
    assert [entry.splitlines()[0] for entry in requirements if "--hash=sha256:" not in entry] == []


def test_every_dependency_is_locked() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    spark = extras["spark"] + [entry for entry in extras["spark-fast"] if not entry.startswith("kcoord")]
    for lock, more in {"run": [], "dev": extras["dev"], "spark": spark}.items():
        locked = set(re.findall(r"^([a-z0-9-]+)==", (ROOT / "requirements" / f"{lock}.lock").read_text(), re.MULTILINE))
        names = {re.split(r"[<>=~!\[]", entry)[0] for entry in [*project["dependencies"], *more]}
        assert names - locked == set()
