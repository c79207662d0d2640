# SPDX-License-Identifier: Apache-2.0
"""Hadoop's file system for S3 and the parts of Amazon's SDK that it needs, for Spark. The SDK's bundle of all its
services would be 600 MB; these are 19 MB.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Final

import pyspark

from tests.support.shared import missing

RESOLVE_SECONDS: Final = 600
SDK: Final = "2.35.4"
"""The version with which Hadoop 3.5.0 was built."""
SDK_PARTS: Final = ("s3", "s3-transfer-manager", "apache-client", "netty-nio-client", "sts")
_DEPENDENCY: Final = (
    "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version><exclusions>"
    "<exclusion><groupId>software.amazon.awssdk</groupId><artifactId>bundle</artifactId></exclusion>"
    "</exclusions></dependency>"
)


def hadoop_version() -> str:
    """That of Spark's own Hadoop: both must be the same."""
    folder = Path(pyspark.__file__).parent / "jars"
    (jar,) = folder.glob("hadoop-client-api-*.jar")
    return jar.stem.removeprefix("hadoop-client-api-")


def s3_jars() -> list[str]:
    """Resolved once by Maven and kept in a cache folder of the user."""
    if shutil.which("mvn") is None:
        missing("mvn is not installed")
    version = hadoop_version()
    folder = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kcoord-tests"
    folder.mkdir(parents=True, exist_ok=True)
    cache = folder / f"hadoop-aws-{version}.classpath"
    if not (cache.exists() and all(Path(jar).exists() for jar in cache.read_text().split(":"))):
        wanted = [("org.apache.hadoop", "hadoop-aws", version)]
        wanted += [("software.amazon.awssdk", part, SDK) for part in SDK_PARTS]
        dependencies = "".join(_DEPENDENCY.format(*each) for each in wanted)
        pom = folder / f"hadoop-aws-{version}.xml"
        pom.write_text(
            '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
            "<groupId>kcoord</groupId><artifactId>lake-tests</artifactId><version>1</version>"
            f"<dependencies>{dependencies}</dependencies></project>"
        )
        resolved = folder / f"{cache.name}.{os.getpid()}"
        command = ["mvn", "-q", "-f", str(pom), "dependency:build-classpath", "-Dmdep.includeScope=runtime"]
        done = subprocess.run(
            [*command, f"-Dmdep.outputFile={resolved}"], capture_output=True, text=True, timeout=RESOLVE_SECONDS
        )
        assert done.returncode == 0, done.stdout + done.stderr
        resolved.replace(cache)
    return cache.read_text().strip().split(":")
