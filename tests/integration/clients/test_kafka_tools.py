# SPDX-License-Identifier: Apache-2.0
"""A tool of Kafka does in the shared JVM of the tests what it does in a JVM of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.kafka_jars import TOOL_SECONDS, TOOLS, KafkaJars
from tests.support.kafka_tools import SOURCE, KafkaTools
from tests.support.kcoord_process import KcoordProcess


@pytest.mark.java
def test_output_and_exit_code_are_the_same(broker: KcoordProcess) -> None:
    """The second tool returns with an error, the third one exits. The fourth one runs in the same JVM."""
    jars = KafkaJars()
    shared = KafkaTools(jars.program(SOURCE), TOOL_SECONDS)
    described = ("features", "--bootstrap-server", broker.address, "describe")
    codes = []
    for name, *arguments in (
        described,
        ("topics", "--bootstrap-server", broker.address, "--describe", "--topic", "absent"),
        ("topics", "--bootstrap-server", broker.address),
        described,
    ):
        own = subprocess.run(
            jars.command(TOOLS[name], *arguments), input="", capture_output=True, text=True, timeout=TOOL_SECONDS
        )
        done = shared.run(TOOLS[name], *arguments)
        # A stack trace has the frames below the tool.
        assert (done.returncode, done.stdout) == (own.returncode, own.stdout)
        assert done.stderr.splitlines()[:1] == own.stderr.splitlines()[:1]
        codes.append(done.returncode)
    assert codes == [0, 1, 1, 0]


def test_a_jvm_that_ends_or_hangs_is_reported() -> None:
    for program, seconds in (("raise SystemExit(3)", 30), ("import time; time.sleep(60)", 0.5)):
        with pytest.raises(AssertionError, match=r"the JVM of \('Tool',\) ended with"):
            KafkaTools([sys.executable, "-c", program], seconds).run("Tool")
