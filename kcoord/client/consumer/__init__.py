# SPDX-License-Identifier: Apache-2.0
"""The consumer: pure state machines, and tasks that drive them.

Theory of operation. Everything runs in one event loop. The application's task calls `Consumer`; these tasks run in the
background:

- `GroupSession` sends the heartbeats of `Membership`.
- `Positions` finds out where to begin to read each partition.
- `Fetcher` fetches records ahead of `poll`, with one task per request.
- `MetadataUpdater` fetches the metadata that the other parts request.
- `CommitManager` starts one task per asynchronous commit.

They share one `Signal`, `changed`, which is notified of each change. `poll` and the fetcher wait for it.

Background tasks never change the assignment. `ConsumerRebalance` carries out each step of a rebalance in the
application's task, within `poll`, `unsubscribe` and `close`. So a listener never runs while the application processes
records. Another member can own a partition at that time only if this member was fenced or missed
`max_poll_interval_ms`.

A revocation has this order: stop handing out records, commit, call the listener, remove the partitions, acknowledge
with a heartbeat. An assignment has this order: add the partitions, call the listener, then find the positions and
fetch.

Each jump of a position begins a new `generation` of the partition. A response to a request of an older generation is
dropped, so it cannot undo a seek.

The consumer stores nothing itself. After a crash the next owner of a partition begins at the committed offset, and
reads the records after it again.
"""
