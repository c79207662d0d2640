# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests.

Hypothesis never fails because the machine is busy. The end of a run lists retries after a race in a client library.
Long files start first.
"""

from __future__ import annotations

import gc
from collections.abc import Generator
from fcntl import LOCK_EX, flock

import pytest
from hypothesis import HealthCheck, settings
from xdist.remote import Producer

from tests.support.client_races import take_retries
from tests.support.scheduling import LongFilesFirst, put_spark_first

settings.register_profile("kcoord", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kcoord")

_CLIENT_RACE = "client race"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attaches retries to the report, which the worker processes of pytest-xdist send to the main process."""
    report = yield
    report.user_properties += [(_CLIENT_RACE, race) for race in take_retries()]
    return report


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps the garbage collector away from what the collection makes: 480,000 objects that live until the end.

    With Python's threshold of 700 objects, the collector takes a twentieth of the CPU time of the simulation.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(50_000, 20, 100)
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Lets one process at a time import a test module, so that the others read the byte code that it has written.

    Otherwise all processes rewrite the assertions of all modules in the first run of a clone.
    """
    if not isinstance(collector, pytest.Module):
        return (yield)
    with collector.path.open() as source:
        flock(source, LOCK_EX)
        return (yield)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LongFilesFirst | None:
    return LongFilesFirst(config, log) if config.option.dist == "loadfile" else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        put_spark_first(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    retries = [
        f"{report.nodeid}: {race}"
        for reports in terminalreporter.stats.values()
        for report in reports
        if isinstance(report, pytest.TestReport)
        for name, race in report.user_properties
        if name == _CLIENT_RACE
    ]
    if retries:
        terminalreporter.section(f"{len(retries)} retries after a race of a client library")
        for line in retries:
            terminalreporter.line(line)
