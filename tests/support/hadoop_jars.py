# SPDX-License-Identifier: Apache-2.0
"""The jars of Hadoop's S3 file system for Spark, with the parts of Amazon's SDK that it needs.

These are 19 MB. The SDK's bundle of all services has 600 MB.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pyspark

from tests.support.kafka_jars import resolved_class_path

SDK: Final = "2.35.4"
"""The SDK version that Hadoop 3.5.0 was built with."""
SDK_PARTS: Final = ("s3", "s3-transfer-manager", "apache-client", "netty-nio-client", "sts")
_DEPENDENCY: Final = (
    "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version><exclusions>"
    "<exclusion><groupId>software.amazon.awssdk</groupId><artifactId>bundle</artifactId></exclusion>"
    "</exclusions></dependency>"
)


def hadoop_version() -> str:
    """Returns the version of Spark's own Hadoop, which the S3 file system must have too."""
    folder = Path(pyspark.__file__).parent / "jars"
    (jar,) = folder.glob("hadoop-client-api-*.jar")
    return jar.stem.removeprefix("hadoop-client-api-")


def s3_jars() -> list[str]:
    """Returns the paths of the jars. Maven resolves them once into a cache folder of the user."""
    version = hadoop_version()
    artifacts = [("org.apache.hadoop", "hadoop-aws", version)]
    artifacts += [("software.amazon.awssdk", part, SDK) for part in SDK_PARTS]
    dependencies = "".join(_DEPENDENCY.format(*artifact) for artifact in artifacts)
    pom = (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>kcoord</groupId><artifactId>lake-tests</artifactId><version>1</version>"
        f"<dependencies>{dependencies}</dependencies></project>"
    )
    return resolved_class_path(f"hadoop-aws-{version}", pom).split(":")
