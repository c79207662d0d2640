# SPDX-License-Identifier: Apache-2.0
"""Apache Kafka's own Java clients and command-line tools, from its published jars."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import threading
import zlib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import IO

from kcoord.testing import start_broker
from tests.support import kafka_tools
from tests.support.class_archives import archive_options, cache_folder, only_one_makes
from tests.support.java import SHORT_LIVED
from tests.support.kafka_tools import KafkaTools
from tests.support.shared import ROOT, missing, shared
from tests.support.waiting import wait_until

RESOLVE_SECONDS = 600
TOOL_SECONDS = 90
VERSION = "4.3.1"
_STREAMS_POM = f"""<?xml version="1.0" encoding="UTF-8"?>
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>kcoord</groupId><artifactId>kafka-streams</artifactId><version>1</version>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId><artifactId>kafka-streams</artifactId><version>{VERSION}</version>
    </dependency>
    <dependency><groupId>org.slf4j</groupId><artifactId>slf4j-nop</artifactId><version>1.7.36</version></dependency>
  </dependencies>
</project>
"""
TOOLS = {
    "acls": "org.apache.kafka.tools.AclCommand",
    "cluster": "org.apache.kafka.tools.ClusterTool",
    "configs": "kafka.admin.ConfigCommand",
    "console-consumer": "org.apache.kafka.tools.consumer.ConsoleConsumer",
    "console-share-consumer": "org.apache.kafka.tools.consumer.ConsoleShareConsumer",
    "console-producer": "org.apache.kafka.tools.ConsoleProducer",
    "consumer-groups": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "delegation-tokens": "org.apache.kafka.tools.DelegationTokenCommand",
    "dump-log": "org.apache.kafka.tools.DumpLogSegments",
    "features": "org.apache.kafka.tools.FeatureCommand",
    "leader-election": "org.apache.kafka.tools.LeaderElectionCommand",
    "metadata-quorum": "org.apache.kafka.tools.MetadataQuorumCommand",
    "reassign": "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
    "topics": "org.apache.kafka.tools.TopicCommand",
}


def resolved_class_path(name: str, pom: str) -> str:
    """Returns the class path of the dependencies in a POM. Maven resolves it once into a cache folder of the user."""
    for needed in ("java", "mvn"):
        if shutil.which(needed) is None:
            missing(f"{needed} is not installed")
    folder = cache_folder()
    cache = folder / f"{name}.classpath"
    with only_one_makes(cache.name):
        if not (cache.exists() and all(Path(jar).exists() for jar in cache.read_text().strip().split(":"))):
            pom_file = folder / f"{name}.xml"
            pom_file.write_text(pom)
            command = ["mvn", "-q", "-f", str(pom_file), "dependency:build-classpath"]
            # If this process is killed meanwhile, no later one uses half of a class path.
            resolved = folder / f"{cache.name}.{os.getpid()}"
            command += [f"-Dmdep.outputFile={resolved}", "-Dmdep.includeScope=runtime"]
            environment = {**os.environ, "MAVEN_OPTS": SHORT_LIVED}
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=RESOLVE_SECONDS)
            assert done.returncode == 0, done.stdout + done.stderr
            resolved.replace(cache)
    return cache.read_text().strip()


def streams_class_path() -> str:
    """Returns the class path of Kafka Streams, with Java's clients."""
    return resolved_class_path(f"kafka-streams-{VERSION}", _STREAMS_POM)


def compiled(source: Path, class_path: str) -> Path:
    """Returns the folder with the classes of a Java program. It is compiled once, into a cache folder of the user.

    Java could run the source itself, but would compile it at each start, which takes 0.8 s of CPU time.
    """
    folder = cache_folder() / f"{source.stem}-{zlib.crc32(source.read_bytes()):08x}"
    with only_one_makes(folder.name):
        if not folder.exists():
            written = folder.with_suffix(f".{os.getpid()}")
            options = [f"-J{option}" for option in SHORT_LIVED.split()]
            command = ["javac", *options, "-cp", class_path, "-d", str(written), str(source)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=TOOL_SECONDS)
            assert done.returncode == 0, done.stdout + done.stderr
            written.rename(folder)
    return folder


class KafkaJars:
    """The class path of Kafka.

    Only the class path of 4.3.1 has the tools, since those of other versions are not published. They work with any
    broker.
    """

    def __init__(self, version: str = VERSION) -> None:
        self.version = version
        pom = shared("anchors", "kafka", "pom.xml").read_text().replace(VERSION, version)
        if version != VERSION:
            pom = re.sub(r".*<artifactId>kafka-tools</artifactId>.*\n", "", pom)
        self.class_path = resolved_class_path(f"kafka-{version}", pom)
        self._options = f"-Xmx192m {SHORT_LIVED}"
        if version == VERSION:
            self._options += f" {archive_options('kafka', 'java', SHORT_LIVED, self.class_path, self._dump)}"

    def _dump(self, options: str) -> None:
        """Runs a tool as tests do."""
        with start_broker() as broker:
            broker.create_topic("topic")
            arguments = (TOOLS["topics"], "--bootstrap-server", broker.bootstrap_servers, "--describe")
            command = self.command(*options.split(), *arguments)
            subprocess.run(command, capture_output=True, check=True, timeout=TOOL_SECONDS)

    def command(self, *arguments: str) -> list[str]:
        return ["java", *self._options.split(), "-cp", self.class_path, *arguments]

    def program(self, source: Path, *arguments: str) -> list[str]:
        """Returns the command that runs a Java program.

        Its folder follows the jars in the class path, so that the archive of their classes still fits.
        """
        class_path = f"{self.class_path}:{compiled(source, self.class_path)}"
        return ["java", *self._options.split(), "-cp", class_path, source.stem, *arguments]

    def tool(
        self,
        name: str,
        *arguments: str,
        stdin: str = "",
        check: bool = True,
        properties: Mapping[str, str] = MappingProxyType({}),
    ) -> str:
        """Runs a Kafka tool and returns its output.

        A tool with standard input or system properties gets a JVM of its own, and so does a console client, which
        leaves work to the end of its JVM. The others share one.
        """
        if stdin or properties or name.startswith("console-"):
            options = [f"-D{key}={value}" for key, value in properties.items()]
            done = subprocess.run(
                self.command(*options, TOOLS[name], *arguments),
                input=stdin,
                capture_output=True,
                text=True,
                timeout=TOOL_SECONDS,
            )
        else:
            done = _tools().run(TOOLS[name], *arguments)
        assert done.returncode == 0 or not check, f"{name} {arguments}: {done.stdout}{done.stderr}"
        return done.stdout + done.stderr


@cache
def _tools() -> KafkaTools:
    return KafkaTools(KafkaJars().program(kafka_tools.SOURCE), TOOL_SECONDS)


class JavaMember:
    """A group member of Kafka's Java client: GroupMember.java in its own JVM."""

    SOURCE = ROOT / "tests" / "integration" / "clients" / "java" / "GroupMember.java"

    def __init__(self, jars: KafkaJars, address: str, group_id: str, topic: str) -> None:
        self._process = subprocess.Popen(
            jars.program(self.SOURCE, address, group_id, topic),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.owned: set[int] = set()
        self.seen = 0
        self.closed = False
        self.errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._read, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def _pipe(self, pipe: IO[str] | None) -> IO[str]:
        assert pipe is not None
        return pipe

    def _read(self) -> None:
        for line in self._pipe(self._process.stdout):
            event, _, value = line.strip().partition(" ")
            if event == "owns":
                self.owned = {int(number) for number in value.split(",") if number}
            elif event == "seen":
                self.seen = int(value)
            elif event == "closed":
                self.closed = True

    def _read_errors(self) -> None:
        self.errors.extend(self._pipe(self._process.stderr))

    def leave(self) -> None:
        self._pipe(self._process.stdin).close()
        wait_until(lambda: self.closed, "the Java consumer has left", 30)
        self._process.wait(20)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for thread in self._threads:
            thread.join(5)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            self._pipe(pipe).close()
