# SPDX-License-Identifier: Apache-2.0
"""Paths, modules, make targets, commands, configuration keys and metrics that documents name exist."""

from __future__ import annotations

import importlib.util
import re
import tomllib

from docs.make_metrics import sample_snapshot
from kcoord.cli import COMMANDS
from kcoord.client.assignors.loading import ENTRY_POINTS
from kcoord.config import BROKER_KEYS, CLIENT_METRICS_KEYS, GROUP_KEYS, TOPIC_KEYS
from kcoord.metrics.exposition import families
from kcoord.runtime.serde import PRINCIPAL_HEADER, REASON_HEADER
from tests.support.shared import ROOT

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "schemas" / "README.md"])
QUOTED = re.compile(r"`([^`\n]+)`")
MAKE = re.compile(r"(?:^ {0,4}|`|^\$ )make ([a-z][a-z-]+)", re.MULTILINE)
COMMAND = re.compile(r"(?:^ {4}\$ |^\$ |`)kcoord ([a-z][a-z-]+)", re.MULTILINE)
PATH = re.compile(r"(?:kcoord|protocol|schemas|tests|docs|bench|examples|docker|requirements|\.ci)/[\w./*-]+")
MODULE = re.compile(r"kcoord_protocol\.[a-z_0-9.]+|kcoord\.[a-z0-9.]*_[a-z_0-9.]+")
KEY = re.compile(
    r"(?:kcoord|group\.consumer|group\.coordinator|offsets|transaction\.state|log\.cleaner)(?:\.[a-z0-9-]+)+"
)
WORKER_KEY = re.compile(r"kcoord\.worker\.\d+\..+")
OTHER_KEYS = ("kcoord.log", REASON_HEADER, PRINCIPAL_HEADER)
"""The setting of Spark's declarative pipeline in examples/lake-pipeline, and the headers of tombstones."""
METRIC = re.compile(r"(?:kafka|kcoord)_[a-z_]+_(?:ms|count|total|rate|avg|min|max|size|num_partitions)")
INSTALL = re.compile(r"pip install (?:--?\w+ )*'?([^\s`'\"]+)")


def names(pattern: re.Pattern[str]) -> list[tuple[str, str]]:
    """(document, name) for each quoted name that is as the pattern says."""
    return sorted(
        {
            (str(path.relative_to(ROOT)), text)
            for path in DOCUMENTS
            for text in QUOTED.findall(path.read_text())
            if pattern.fullmatch(text)
        }
    )


def test_paths() -> None:
    assert [name for name in names(PATH) if not list(ROOT.glob(name[1].rstrip("/")))] == []


def test_make_targets() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    mentioned = {(path.name, target) for path in DOCUMENTS for target in MAKE.findall(path.read_text())}
    assert mentioned
    assert {mention for mention in mentioned if mention[1] not in targets} == set()


def test_commands() -> None:
    mentioned = {(path.name, command) for path in DOCUMENTS for command in COMMAND.findall(path.read_text())}
    assert mentioned
    assert {mention for mention in mentioned if mention[1] not in COMMANDS} == set()


def test_keys() -> None:
    keys = {*BROKER_KEYS, *GROUP_KEYS, *TOPIC_KEYS, *CLIENT_METRICS_KEYS}
    unknown = [name for name in names(KEY) if name[1] not in keys and WORKER_KEY.fullmatch(name[1]) is None]
    assert [name for name in unknown if not _is_module(name[1]) and name[1] not in OTHER_KEYS] == []


def test_modules() -> None:
    assert [name for name in names(MODULE) if not _is_module(name[1]) and name[1] != ENTRY_POINTS] == []


def test_metrics() -> None:
    """Prometheus shows the counter `x` as `x_total`."""
    metrics = {
        f"{metric.name}_total" if metric.type == "counter" else metric.name for metric in families(sample_snapshot())
    }
    assert [name for name in names(METRIC) if name[1] not in metrics] == []


def test_installed_packages() -> None:
    """kcoord is in no package index: it is installed from a checkout, with an extra or without."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    targets = {".", *(f".[{extra}]" for extra in extras)}
    paths = [*DOCUMENTS, *(ROOT / "kcoord").rglob("*.py")]
    installed = {(path.name, target) for path in paths for target in INSTALL.findall(path.read_text())}
    assert installed
    assert {mention for mention in installed if mention[1] not in targets and "{" not in mention[1]} == set()


def _is_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
