# SPDX-License-Identifier: Apache-2.0
"""A run of a job of `kcoord lake`, as far as it needs no Spark: which settings a lake keeps."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest

from kcoord.cli.lake import make_parser
from kcoord.cli.lake_run import LakeRun
from kcoord.cli.lake_source import LakeSource
from kcoord.pipeline.lake.ingest import ingest
from kcoord.pipeline.lake.storage import Lake
from tests.support.coordinator_log import batches_of, random_log
from tests.unit.pipeline.support import LogWriter
from tests.unit.pipeline.test_ingest import no_spark


@pytest.fixture
def log(tmp_path: Path) -> str:
    writer = LogWriter(tmp_path / "log", 0)
    for batch in batches_of(random_log(Random(1), 10)):
        writer.append(batch)
    writer.close()
    return str(tmp_path / "log")


@pytest.fixture
def lake(tmp_path: Path, log: str) -> Lake:
    """A lake with the records of the log."""
    made = Lake(no_spark, str(tmp_path / "lake"))
    ingest(made, log)
    return made


def run_of(job: str, lake: Lake, *arguments: str) -> LakeRun:
    return LakeRun(make_parser().parse_args([job, "--lake", lake.uri, *arguments]))


def test_a_lake_keeps_the_settings_that_were_given_or_that_brokers_told(
    lake: Lake, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The brokers tell their retention only after the client has got the right to see it."""

    def stored(*arguments: str) -> dict[str, str]:
        run = run_of("status", lake, *arguments)
        run.jobs(lake)
        return lake.stored_settings()

    assert stored() == {}
    assert stored("--storm-epochs", "7") == {"storm_epochs": "7"}
    told: list[int | None] = [None, 77]
    monkeypatch.setattr(LakeSource, "retention_minutes", lambda source: told.pop(0))
    assert "retention_ms" not in stored("--log", log)
    learned = {"retention_ms": str(77 * 60_000), "storm_epochs": "7"}
    assert stored("--log", log) == learned
    assert stored("--log", log) == learned, "the brokers are not asked again"
    given = stored("--retention-minutes", "5", "--expiry-policy", "kafka")
    assert given == {"retention_ms": "300000", "storm_epochs": "7", "expiry_policy": "kafka"}
    assert stored() == given
