# SPDX-License-Identifier: Apache-2.0
"""`make docker-test`: builds the image and uses the container as users do.

Usage: container.py IMAGE. It needs a Docker daemon, or root to start one. The base image is BASE_IMAGE, or
python:3.13-slim-bookworm. If that cannot be pulled, `$KCOORD_SHARED/tools/docker-here.sh` makes a base image from a
Debian mirror. The output has a line per check and ends with `N passed, N failed`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NoReturn

from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from tests.support.ports import free_ports
from tests.support.shared import ROOT, SHARED

DEFAULT_BASE = "python:3.13-slim-bookworm"
HEALTHY_SECONDS = 60.0
STOP_SECONDS = 5
MESSAGES = 100


def docker(*arguments: str, check: bool = True) -> str:
    done = subprocess.run(["docker", *arguments], capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"docker {' '.join(arguments)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def has_daemon() -> bool:
    return shutil.which("docker") is not None and succeeds("docker", "info")


def succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True).returncode == 0


def base_image() -> str:
    """Returns the name of a base image that the daemon has. Starts a daemon if none runs."""
    base = os.environ.get("BASE_IMAGE") or DEFAULT_BASE
    if has_daemon() and (docker("image", "ls", "--quiet", base) or succeeds("docker", "pull", "--quiet", base)):
        return base
    script = SHARED / "tools" / "docker-here.sh"
    if not script.exists():
        give_up(f"no Docker daemon can pull {base}, and {script}, which would start one, does not exist")
    print(f"no daemon, or no registry with {base}: running {script}", flush=True)
    done = subprocess.run(["bash", str(script)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        give_up("no Docker daemon can run here")
    return done.stdout.strip().splitlines()[-1]


def give_up(reason: str) -> NoReturn:
    sys.exit(f"{reason}\n0 passed, 1 failed")


class Container:
    """One kcoord container with a volume, published on a free port of this machine."""

    def __init__(self, image: str) -> None:
        self.image = image
        self.volume = self.name = f"kcoord-test-{uuid.uuid4().hex[:8]}"
        self.address = f"127.0.0.1:{free_ports()}"

    def run(self) -> None:
        docker(
            "run", "--detach", "--name", self.name, "--publish", f"{self.address}:9092",
            "--volume", f"{self.volume}:/var/lib/kcoord",
            "--env", f"KCOORD_ADVERTISED_LISTENERS=PLAINTEXT://{self.address}", self.image,
        )  # fmt: skip
        self.await_healthy()

    def await_healthy(self) -> None:
        deadline = time.monotonic() + HEALTHY_SECONDS
        while (state := docker("inspect", "--format", "{{.State.Status}} {{.State.Health.Status}}", self.name)) != (
            "running healthy"
        ):
            if time.monotonic() > deadline or state.startswith("exited"):
                raise RuntimeError(f"the container is {state}:\n{self.logs()}")
            time.sleep(0.2)

    def logs(self) -> str:
        done = subprocess.run(["docker", "logs", self.name], capture_output=True, text=True)
        return done.stdout + done.stderr

    def remove(self) -> None:
        docker("rm", "--force", self.name, check=False)

    def inspect(self, template: str) -> str:
        return docker("inspect", "--format", template, self.name)


@contextmanager
def container(image: str) -> Iterator[Container]:
    started = Container(image)
    try:
        started.run()
        yield started
    finally:
        started.remove()
        docker("volume", "rm", "--force", started.volume, check=False)


def consume(address: str, group_id: str, count: int) -> list[int]:
    """Consumes `count` messages as a KIP-848 member, commits, and returns their offsets."""
    consumer = Consumer(
        {
            "bootstrap.servers": address,
            "group.id": group_id,
            "group.protocol": "consumer",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    offsets: list[int] = []
    deadline = time.monotonic() + 30
    try:
        consumer.subscribe(["orders"])
        while len(offsets) < count and time.monotonic() < deadline:
            message = consumer.poll(0.2)
            if message is not None and not message.error():
                offset = message.offset()
                assert offset is not None
                offsets.append(offset)
        if len(offsets) >= count:
            consumer.commit(offsets=[TopicPartition("orders", 0, offsets[-1] + 1)], asynchronous=False)
    finally:
        consumer.close()
    return offsets


def produce(address: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": address, "enable.idempotence": True})
    for number in range(count):
        producer.produce("orders", str(number).encode(), partition=0)
    assert producer.flush(30) == 0


def check_container(image: str) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yields names and checks. Each check relies on the checks before it."""
    with container(image) as broker:
        yield "becomes healthy", lambda: broker.inspect("{{.State.Health.Status}}") == "healthy"
        yield "does not run as root", lambda: docker("exec", broker.name, "id", "-u") != "0"
        yield "stops by SIGTERM", lambda: broker.inspect("{{.Config.StopSignal}}") == "SIGTERM"
        yield (
            "has OCI labels",
            lambda: broker.inspect('{{index .Config.Labels "org.opencontainers.image.title"}}') == "kcoord",
        )
        yield "a topic is created", lambda: create_topic(broker.address)
        yield "a client produces and a group consumes", lambda: passes_on(broker, 0)
        yield "docker stop ends it in time with exit code 0", lambda: stops(broker)
        yield "the group resumes after docker start", lambda: resumes_after(broker, lambda: start(broker), MESSAGES)
        yield (
            "a new container on the same volume resumes too",
            lambda: resumes_after(broker, lambda: replace(broker), 2 * MESSAGES),
        )


def create_topic(address: str) -> bool:
    admin = AdminClient({"bootstrap.servers": address})
    admin.create_topics([NewTopic("orders", 1, 1)])["orders"].result(30)
    return True


def stops(broker: Container) -> bool:
    began = time.monotonic()
    docker("stop", "--time", str(STOP_SECONDS + 5), broker.name)
    took = time.monotonic() - began
    print(f"     stopped after {took:.1f} s")
    return broker.inspect("{{.State.ExitCode}}") == "0" and took < STOP_SECONDS + 1


def start(broker: Container) -> None:
    docker("start", broker.name)
    broker.await_healthy()


def replace(broker: Container) -> None:
    docker("kill", broker.name)
    broker.remove()
    broker.run()


def resumes_after(broker: Container, restart: Callable[[], None], committed: int) -> bool:
    restart()
    return passes_on(broker, committed)


def passes_on(broker: Container, committed: int) -> bool:
    """Produces messages. Returns whether the group consumes them, from the committed offset on."""
    produce(broker.address, MESSAGES)
    return consume(broker.address, "g", MESSAGES) == list(range(committed, committed + MESSAGES))


def build(image: str, dockerfile: str) -> None:
    """Builds an image of the checkout, and prints its size."""
    base = base_image()
    subprocess.run(
        ["docker", "build", "--build-arg", f"BASE_IMAGE={base}", "--tag", image, "--file", dockerfile, "."],
        check=True,
        cwd=ROOT,
    )
    print(f"{image}: {int(docker('image', 'inspect', '--format', '{{.Size}}', image)) // 1_000_000} MB on {base}")


def run_checks(checks: Iterator[tuple[str, Callable[[], bool]]]) -> int:
    """Runs checks, and prints a line for each. Returns the exit code."""
    passed = failed = 0
    try:
        for name, passes in checks:
            ok = passes()
            passed, failed = passed + ok, failed + (not ok)
            print(f"{'ok  ' if ok else 'FAIL'} {name}", flush=True)
    except Exception as error:
        # An exception counts as one failure, and the last line is still printed.
        failed += 1
        print(f"FAIL {type(error).__name__}: {error}")
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


def main() -> int:
    image = sys.argv[1]
    build(image, "docker/Dockerfile")
    return run_checks(check_container(image))


if __name__ == "__main__":
    sys.exit(main())
