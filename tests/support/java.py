# SPDX-License-Identifier: Apache-2.0
"""Checks the Java that Spark needs, and has the options of short-lived JVMs.

Spark's own error for a missing Java has only a script and an exit code.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

LEAST_JAVA: Final = 17
# Published jars need no verification of their byte code, which takes a sixth of the CPU time of a short run.
QUICK_START: Final = "-XX:TieredStopAtLevel=1 -XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
"""Options of a JVM that runs for seconds, with any garbage collector."""
SHORT_LIVED: Final = f"{QUICK_START} -XX:+UseSerialGC"
_SECONDS: Final = 60


class JavaNotFoundError(RuntimeError):
    """There is no Java, or it is too old."""


def require_java() -> int:
    """Returns the Java version that Spark will use. Raises JavaNotFoundError if there is none or it is too old."""
    advice = f"Spark 4 needs Java {LEAST_JAVA} or newer: install it, or set JAVA_HOME"
    home = os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None or not Path(java).exists():
        raise JavaNotFoundError(f"there is no Java{f' in {home}' if home else ''}. {advice}")
    text = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=_SECONDS).stderr
    match = re.search(r'version "(?:1\.)?(\d+)', text)
    version = int(match[1]) if match else 0
    if version < LEAST_JAVA:
        raise JavaNotFoundError(f"{java} is Java {version or 'of an unknown version'}. {advice}")
    return version
