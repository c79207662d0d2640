# SPDX-License-Identifier: Apache-2.0
"""The responses of the HTTP control to wrong requests. The control exists in test mode only."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from http.client import HTTPConnection

import pytest

from kcoord.testing import KcoordBroker, start_broker
from tests.integration.conftest import MakeServer


@pytest.fixture(scope="module")
def process() -> Iterator[KcoordBroker]:
    with start_broker(mode="process") as broker:
        yield broker


def ask(broker: KcoordBroker, method: str, path: str, body: str = "") -> tuple[int, object]:
    assert broker.control_url is not None
    connection = HTTPConnection(broker.control_url.removeprefix("http://"), timeout=10)
    try:
        connection.request(method, path, body)
        response = connection.getresponse()
        assert response.getheader("Content-Type") == "application/json; charset=utf-8"
        return response.status, json.loads(response.read())
    finally:
        connection.close()


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "text"),
    [
        ("GET", "/nothing", "", 404, "unknown path /nothing"),
        ("DELETE", "/clock/advance", "", 405, "/clock/advance supports POST, not DELETE"),
        ("PUT", "/requests", "", 405, "/requests supports GET and DELETE, not PUT"),
        ("POST", "/faults", "{", 400, "the body is not valid JSON"),
        ("POST", "/faults", "[1]", 400, "the body must be a JSON object, not list"),
        ("POST", "/faults", "{}", 400, "a fault needs error, delay_ms, drop or close"),
        ("GET", "/faults/7", "", 404, "there is no fault 7"),
        ("GET", "/faults/x", "", 404, "the number of a fault must be an integer, not 'x'"),
        ("POST", "/topics", "{}", 400, "name is missing"),
        ("POST", "/topics", '{"name": "a b"}', 400, "INVALID_TOPIC_EXCEPTION"),
        ("POST", "/topics/none/records", '{"records": [{"vlaue": "x"}]}', 400, "records[0]: unknown fields: vlaue"),
        ("POST", "/topics/none/records", '{"records": [{"value": "base64:?"}]}', 400, "value is not valid base64"),
        ("GET", "/topics/none/records", "", 404, "UNKNOWN_TOPIC_OR_PARTITION"),
        ("GET", "/groups/g?members=x", "", 400, "members must be an integer"),
        ("GET", "/groups/g?state=Stable&timeout_ms=1", "", 408, "waited 1 ms for state Stable, but group g is Dead"),
        ("PUT", "/groups/g/offsets", '{"offsets": {"t": {"a": 1}}}', 400, "offsets.t must map partitions to offsets"),
        ("PUT", "/groups/g/target", "{}", 400, "members is missing"),
        ("POST", "/clock/advance", '{"ms": -1}', 400, "ms must not be negative"),
        (
            "POST",
            "/clock/advance",
            '{"ms": 3155760000001}',
            400,
            "ms must be at most 3155760000000, which is 100 years",
        ),
        ("POST", "/topics", "[" * 100_000, 400, "the body is not valid JSON"),
        ("GET", "/groups/g?members=%C2%B2", "", 400, "members must be an integer, not '²'"),
        ("GET", "/groups/g?timeout_ms=--5", "", 400, "timeout_ms must be an integer, not '--5'"),
        (
            "PUT",
            "/groups/g/offsets",
            '{"offsets": {"t": {"\\u00b2": 1}}}',
            400,
            "offsets.t must map partitions to offsets",
        ),
        ("GET", "/faults/%C2%B2", "", 404, "the number of a fault must be an integer, not '²'"),
        ("POST", "/faults", '{"error": "--1"}', 400, "unknown error '--1'"),
    ],
)
def test_wrong_requests(process: KcoordBroker, method: str, path: str, body: str, status: int, text: str) -> None:
    actual_status, answer = ask(process, method, path, body)
    assert actual_status == status
    assert isinstance(answer, dict) and text in answer["error"]


def test_a_body_without_a_length_is_rejected(process: KcoordBroker) -> None:
    assert process.control_url is not None
    connection = HTTPConnection(process.control_url.removeprefix("http://"), timeout=10)
    connection.request("POST", "/topics", headers={"Transfer-Encoding": "chunked"})
    response = connection.getresponse()
    assert (response.status, json.loads(response.read())) == (411, {"error": "a body needs a Content-Length"})
    assert response.getheader("Connection") == "close"
    connection.close()


def test_a_wait_for_a_fault_times_out(process: KcoordBroker) -> None:
    status, fault = ask(process, "POST", "/faults", '{"delay_ms": 1, "times": 0}')
    assert status == 200 and isinstance(fault, dict)
    status, answer = ask(process, "GET", f"/faults/{fault['number']}?hits=1&timeout_ms=1")
    assert status == 408 and "but it has 0" in str(answer)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--control-port", "9093"], "--control-port, --control-host and --end-with-stdin need --test-mode"),
        (["--end-with-stdin"], "--control-port, --control-host and --end-with-stdin need --test-mode"),
        (["--test-mode", "--control-port", "65536"], "a port is a number from 0 to 65535"),
        (["--test-mode", "--control-port", "x"], "a port is a number"),
        (["--test-mode", "--override", "group.coordinator.threads=2"], "a test broker is one process"),
        (["--test-mode", "--override", "listeners=SASL_SSL://127.0.0.1:0"], "GSSAPI is not offered"),
    ],
)
def test_options_that_the_command_rejects(options: list[str], error: str) -> None:
    command = [sys.executable, "-m", "kcoord", "serve", *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode in (1, 2)
    assert error in ran.stderr
    assert "Traceback" not in ran.stderr


def test_a_control_port_in_use_is_an_error(process: KcoordBroker) -> None:
    assert process.control_url is not None
    port = process.control_url.rpartition(":")[2]
    options = ["--test-mode", "--override", "listeners=PLAINTEXT://127.0.0.1:0", "--control-port", port]
    command = [sys.executable, "-m", "kcoord", "serve", *options]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 1
    assert f"kcoord: cannot listen on 127.0.0.1:{port} for the control" in ran.stderr


def test_a_broker_that_is_not_in_test_mode_has_no_control(make_server: MakeServer) -> None:
    assert " control http" not in make_server().start().log
