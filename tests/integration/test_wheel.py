# SPDX-License-Identifier: Apache-2.0
"""The wheel and the sdist, built without a network.

They are installed for a project that has modules with the names `protocol`, `schemas` and `tests`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

import kcoord
from tests.support.shared import ROOT, missing

DISTRIBUTION = f"kcoord-{kcoord.__version__}.dist-info"

PROJECT = {
    "protocol.py": 'OWNER = "the project"\n',
    "schemas.py": 'OWNER = "the project"\n',
    "tests/__init__.py": "",
    "tests/test_orders.py": """\
import kcoord
import kcoord_protocol
import protocol
import schemas
import tests


def test_modules_of_the_project_are_its_own():
    assert (protocol.OWNER, schemas.OWNER) == ("the project", "the project")
    assert tests.__file__ in __file__.replace("test_orders", "__init__")
    assert "site-packages" in kcoord.__file__ and "site-packages" in kcoord_protocol.__file__


def test_broker(kcoord_broker):
    kcoord_broker.create_topic("orders")
    kcoord_broker.produce("orders", ["a", "b"])
    kcoord_broker.commit("billing", {"orders": {0: 2}})
    assert [record.value for record in kcoord_broker.records("orders")] == [b"a", b"b"]
    assert kcoord_broker.committed("billing") == {"orders": {0: 2}}
""",
}


def run(*command: object, folder: Path, **variables: str) -> str:
    """Runs a program outside of the checkout's environment and returns its output."""
    environment = {
        name: text for name, text in os.environ.items() if not name.startswith(("KCOORD_", "PYTHON", "PYTEST_"))
    }
    environment |= variables
    done = subprocess.run(
        [str(part) for part in command], cwd=folder, env=environment, text=True, capture_output=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_wheel(source: Path, target: Path, **variables: str) -> Path:
    """Builds a wheel with the hatchling of the tests' environment. `variables` of the environment choose its kind."""
    quiet = ("--quiet", "--disable-pip-version-check", "--no-index")
    options = ("--no-deps", "--no-build-isolation", "--wheel-dir", target)
    run(sys.executable, "-m", "pip", "wheel", *quiet, *options, source, folder=target, **variables)
    (wheel,) = target.glob("*.whl")
    return wheel


def digests(wheel: Path) -> dict[str, str]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}


def digests_of_folder(folder: Path, prefix: str) -> dict[str, str]:
    return {
        f"{prefix}/{path.relative_to(folder).as_posix()}": hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so"
    }


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A new virtual environment with the wheel. Its dependencies and pytest are those of the tests' environment.

    The tests' environment also has kcoord, as an editable install of the checkout, which must not be visible.
    """
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    scheme = {"base": str(folder), "platbase": str(folder)}
    site_packages = Path(sysconfig.get_path("purelib", "venv", scheme))
    libraries = tmp_path_factory.mktemp("libraries")
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if "kcoord" not in path.name and path.suffix != ".pth":
            (libraries / path.name).symlink_to(path)
    (site_packages / "libraries.pth").write_text(f"{libraries}\n")
    python = folder / "bin" / "python"
    options = ("--quiet", "--disable-pip-version-check", "--no-index", "--no-deps")
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, folder=folder)
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for name, text in PROJECT.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


def test_the_wheel_contains_exactly_two_packages(wheel: Path) -> None:
    files = digests(wheel)
    assert {name.split("/")[0] for name in files} == {"kcoord", "kcoord_protocol", DISTRIBUTION}
    expected = {
        **digests_of_folder(ROOT / "kcoord", "kcoord"),
        **digests_of_folder(ROOT / "protocol" / "kcoord_protocol", "kcoord_protocol"),
        **digests_of_folder(ROOT / "schemas", "kcoord_protocol/_schemas"),
    }
    assert {name: digest for name, digest in files.items() if not name.startswith(DISTRIBUTION)} == expected
    assert {"kcoord/config/keys.txt", "kcoord/py.typed", "kcoord_protocol/py.typed"} <= expected.keys()
    assert "kcoord_protocol/_schemas/requests/ConsumerGroupHeartbeatRequest.json" in expected


def test_a_platform_wheel_is_the_pure_wheel_with_the_compiled_module(wheel: Path, tmp_path: Path) -> None:
    if shutil.which(str(sysconfig.get_config_var("CC")).split()[0]) is None:
        missing("there is no C compiler")
    assert wheel.name.endswith("-py3-none-any.whl")
    platform_wheel = build_wheel(ROOT, tmp_path, KCOORD_COMPILE="1")
    assert not platform_wheel.name.endswith("-any.whl")
    pure, compiled = digests(wheel), digests(platform_wheel)
    more = {name for name in compiled if name.endswith(str(sysconfig.get_config_var("EXT_SUFFIX")))}
    assert {name.split(".")[0] for name in more} == {
        "kcoord_protocol/compiled_record_check",
        "kcoord_protocol/compiled_record_check__mypyc",
    }
    changed = {name for name in compiled.keys() - more if pure.get(name) != compiled[name]}
    assert changed == {f"{DISTRIBUTION}/{name}" for name in ("RECORD", "WHEEL")}
    assert pure.keys() == compiled.keys() - more
    for built, form in ((wheel, "pure Python"), (platform_wheel, "with compiled checks of records")):
        folder = tmp_path / form
        with zipfile.ZipFile(built) as archive:
            archive.extractall(folder)
        version = run(sys.executable, "-m", "kcoord", "--version", folder=folder)
        assert version == f"kcoord {kcoord.__version__}, {form}\n"


def test_a_wheel_built_from_the_sdist_is_the_same(wheel: Path, tmp_path: Path) -> None:
    run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", tmp_path, folder=ROOT)
    with tarfile.open(tmp_path / f"kcoord-{kcoord.__version__}.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    of_sdist = build_wheel(tmp_path / f"kcoord-{kcoord.__version__}", tmp_path)
    assert digests(of_sdist) == digests(wheel)


@pytest.mark.parametrize("mode", ["in-process", "process"])
def test_pytest_in_a_project_with_modules_of_the_same_names(environment: Path, project: Path, mode: str) -> None:
    options = ("-q", "-p", "no:cacheprovider", f"--kcoord-broker={mode}")
    output = run(environment / "bin" / "python", "-m", "pytest", *options, folder=project)
    assert "2 passed" in output


def test_commands_in_a_project_with_modules_of_the_same_names(environment: Path, project: Path) -> None:
    python = environment / "bin" / "python"
    expected = f"kcoord {kcoord.__version__}"
    assert run(environment / "bin" / "kcoord", "--version", folder=project).startswith(expected)
    assert run(python, "-m", "kcoord", "--version", folder=project).startswith(expected)
    for package in ("kcoord", "kcoord_protocol.messages"):
        path = run(python, "-c", f"import {package} as package; print(package.__file__)", folder=project)
        assert Path(path.strip()).is_relative_to(environment)
