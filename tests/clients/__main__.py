# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.clients [java] [go]`: runs the scenarios of Kafka's Java client and of franz-go.

Each client gets a kcoord process of its own. The output has a line per scenario and ends with `N passed, N failed`. The
exit code is 1 if any scenario failed.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import FAST, KcoordProcess

HERE = Path(__file__).parent
RUN_SECONDS = 600
MISSING = (pytest.skip.Exception, pytest.fail.Exception)
_SUMMARY = re.compile(r"^(\d+) passed, (\d+) failed$", re.MULTILINE)


def java() -> list[str]:
    return KafkaJars().command(str(HERE / "java" / "Scenarios.java"))


def go() -> list[str]:
    program = shutil.which("go")
    if program is None:
        raise FileNotFoundError("go is not installed")
    return [program, "run", "-C", str(HERE / "go"), "."]


CLIENTS = {"java": java, "go": go}


def main(names: list[str]) -> int:
    passed = failed = 0
    for name in names or CLIENTS:
        good, bad = run(name)
        passed, failed = passed + good, failed + bad
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def run(name: str) -> tuple[int, int]:
    """Returns the numbers of passed and failed scenarios. A client that cannot run counts as one failure."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            command = CLIENTS[name]()
        except (OSError, AssertionError, subprocess.SubprocessError, *MISSING) as error:
            print(f"FAILED {name}: {error}")
            return 0, 1
        # The clients must not mind the APIs that no release of Kafka has.
        broker = KcoordProcess(Path(folder), {**FAST, "kcoord.client.assignors.enable": "true"}).start()
        try:
            done = subprocess.run([*command, broker.address], capture_output=True, text=True, timeout=RUN_SECONDS)
        except subprocess.TimeoutExpired as error:
            print(f"FAILED {name}: not finished within {error.timeout:g} s; output so far:\n{error.stdout!r}")
            return 0, 1
        finally:
            broker.stop()
        summary = _SUMMARY.search(done.stdout)
        print(_SUMMARY.sub("", done.stdout).strip())
        if summary is None:
            print(f"FAILED {name}: exit code {done.returncode}\n{done.stderr}")
            return 0, 1
        if done.returncode:
            print(broker.log)
        return int(summary[1]), int(summary[2])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
