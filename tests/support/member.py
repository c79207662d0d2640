# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.support.member ADDRESS GROUP TOPIC [STRATEGY]`: a group member to be killed, of a KIP-848 group or,
with a strategy, of a classic one. Prints `ready` when it owns partitions.
"""

from __future__ import annotations

import sys

from confluent_kafka import Consumer

from tests.support.confluent import consumer_config


def main() -> None:
    address, group_id, topic, *classic = sys.argv[1:]
    consumer = Consumer(consumer_config(address, group_id, classic=classic[0] if classic else None))
    consumer.subscribe([topic])
    told = False
    while True:
        consumer.poll(0.1)
        if not told and consumer.assignment():
            told = True
            print("ready", flush=True)


if __name__ == "__main__":
    main()
