# SPDX-License-Identifier: Apache-2.0
"""A broker whose clock is set back while it is stopped."""

from __future__ import annotations

from kcoord.client import AdminClient, Consumer, NewTopic
from kcoord.testing.host import BrokerHost

HOUR_MS = 3_600_000


async def test_partitions_that_are_added_later_are_newer_than_the_group() -> None:
    """Otherwise KIP-1327 treats them as older, and a consumer with `latest` misses their first records."""
    host = BrokerHost({})
    await host.start(ahead_ms=HOUR_MS)
    try:
        async with AdminClient(bootstrap_servers=host.bootstrap_servers) as admin:
            (await admin.create_topics([NewTopic("t", 1, 1)])).all()
            async with Consumer(bootstrap_servers=host.bootstrap_servers, group_id="g") as consumer:
                consumer.subscribe(["t"])
                while not consumer.assignment:
                    await consumer.poll(50)
            before = (await admin.describe_consumer_groups(["g"]))["g"].group_creation_time_ms
        await host.stop()
        await host.start(ahead_ms=0)
        async with AdminClient(bootstrap_servers=host.bootstrap_servers) as admin:
            group = (await admin.describe_consumer_groups(["g"]))["g"]
            (await admin.create_partitions({"t": 2})).all()
            times = [partition.creation_time_ms for partition in (await admin.describe_topics(["t"]))["t"].partitions]
    finally:
        await host.stop()
    assert before is not None and group.group_creation_time_ms == before
    assert times[0] is not None and times[1] is not None
    assert times[0] <= before < times[1]
