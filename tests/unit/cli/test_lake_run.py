# SPDX-License-Identifier: Apache-2.0
"""Runs of lake jobs, without Spark and brokers."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from kcoord.cli import lake_run
from kcoord.cli.lake_run import LakeRun
from kcoord.cli.lake_source import LakeSource
from kcoord.pipeline.lake.errors import TablesUnavailableError
from kcoord.pipeline.lake.samples import Sample, Topics
from kcoord.pipeline.options import SourceOptions


def test_a_followed_log_is_copied_again_when_its_tables_are_back(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop, copies = threading.Event(), 0

    def copy_next() -> None:
        nonlocal copies
        copies += 1
        if copies == 1:
            raise TablesUnavailableError("catalog kcoord: it does not answer")
        stop.set()

    run = object.__new__(LakeRun)
    run.source = None
    monkeypatch.setattr(lake_run, "stop_on_signals", lambda: nullcontext(stop))
    monkeypatch.setattr(run, "_ingest", SimpleNamespace(alone=nullcontext, next=copy_next), raising=False)
    monkeypatch.setattr(run, "_lakes", [SimpleNamespace(check_tables=lambda: None)], raising=False)
    monkeypatch.setattr(run, "_options", SimpleNamespace(audit=[]), raising=False)
    monkeypatch.setattr(run, "_begin", lambda: None)
    run.follow(0.001)
    assert copies == 2
    assert capsys.readouterr().err == "warning: catalog kcoord: it does not answer; trying again\n"


@pytest.mark.parametrize(("topic", "warns"), [(None, True), ("__kcoord_offsets", False)])
def test_the_first_copy_says_which_groups_a_gateway_has(
    topic: str | None, warns: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"kafka.bootstrap.servers": "127.0.0.1:1"} | ({} if topic is None else {"topic": topic})
    source = LakeSource(SourceOptions.parse(given), None)
    source.warn_of_gateway(Sample(datetime.now(UTC), [], topics=Topics({"id": "__kcoord_offsets"})))
    assert ("are in __kcoord_offsets (--topic)" in capsys.readouterr().err) is warns
