# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.support.member ADDRESS GROUP TOPIC [STRATEGY]`: runs a group member until it is killed.

It uses KIP-848, or the classic protocol if a strategy is given. It prints `ready` when it owns partitions.
"""

from __future__ import annotations

import sys

from confluent_kafka import Consumer

from tests.support.confluent import consumer_config


def main() -> None:
    address, group_id, topic, *classic = sys.argv[1:]
    consumer = Consumer(consumer_config(address, group_id, classic=classic[0] if classic else None))
    consumer.subscribe([topic])
    is_ready = False
    while True:
        consumer.poll(0.1)
        if not is_ready and consumer.assignment():
            is_ready = True
            print("ready", flush=True)


if __name__ == "__main__":
    main()
