# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests: Hypothesis never fails because the machine is busy, and retries after a client's own race are
counted and named.
"""

from __future__ import annotations

from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings

from tests.support.client_races import take_retries

settings.register_profile("kcoord", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kcoord")

_CLIENT_RACE = "client race"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach retries to the report, which also travels from the worker processes of pytest-xdist."""
    report = yield
    report.user_properties += [(_CLIENT_RACE, race) for race in take_retries()]
    return report


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
