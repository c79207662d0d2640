# SPDX-License-Identifier: Apache-2.0
"""Page faults of a process that allocates and frees as much as a large read of a connection takes."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.shared import ROOT

SCRIPT = """
import resource
from kcoord.server.heap import keep_freed_memory

def read():
    data = b"r" * 256_000
    frames = [data[:98_000], data[98_000:196_000]]
    return [frame[at : at + 16_000] for frame in frames for at in range(0, 96_000, 16_000)]

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

keep_freed_memory()
for _ in range(10):
    read()
before = faults()
for _ in range(100):
    read()
print(faults() - before)
"""


def faults_of_100_reads() -> int:
    command = [sys.executable, "-c", SCRIPT]
    # A threshold that the environment sets would stay as it is.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True, timeout=60)
    return int(done.stdout)


def test_the_pages_of_a_large_read_are_used_again() -> None:
    assert faults_of_100_reads() < 100
