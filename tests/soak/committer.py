# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.soak.committer ADDRESS GROUP TOPIC`: a member of a KIP-848 group in its own process.

Tests pause it with SIGSTOP. It prints `owns NUMBER` when its assignment changes, and `PARTITION OFFSET` for each
acknowledged commit.
"""

from __future__ import annotations

import subprocess
import sys
import threading
from types import TracebackType

from confluent_kafka import Consumer, KafkaException

from tests.soak.streams import QUICK
from tests.support.confluent import consumer_config
from tests.support.shared import ROOT


class Committer:
    """The process, and the commits that it has printed."""

    def __init__(self, address: str, group_id: str, topic: str) -> None:
        self.committed: dict[int, int] = {}
        self.owned = 0
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.soak.committer", address, group_id, topic],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Committer:
        self._thread.start()
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self._process.kill()
        self._process.wait()
        self._thread.join(10)
        assert self._process.stdout is not None
        self._process.stdout.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            what, number = line.split()
            if what == "owns":
                self.owned = int(number)
            else:
                self.committed[int(what)] = max(self.committed.get(int(what), 0), int(number))


def main() -> None:
    address, group_id, topic = sys.argv[1:]
    consumer = Consumer(consumer_config(address, group_id) | QUICK)
    consumer.subscribe([topic])
    owned = 0
    while True:
        message = consumer.poll(0.1)
        if len(consumer.assignment()) != owned:
            owned = len(consumer.assignment())
            print(f"owns {owned}", flush=True)
        if message is None or message.error():
            continue
        try:
            consumer.commit(message=message, asynchronous=False)
        except KafkaException:
            continue
        offset = message.offset()
        assert offset is not None
        print(message.partition(), offset + 1, flush=True)


if __name__ == "__main__":
    main()
