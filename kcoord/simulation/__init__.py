# SPDX-License-Identifier: Apache-2.0
"""Deterministic simulation: the server's own broker in virtual time, with model clients, driven by one seed.

Theory of operation
-------------------
What is real. `process.SimulatedProcess` is `kcoord.server.process.BrokerProcess`, composed by
`kcoord.server.composition` as in production: connections, API table, handlers, fast paths, shards, state machines,
logs, journal, cleaner, snapshots and the metadata follower. `controller.Controller` runs a second composed broker,
which owns the metadata log. Nothing in this package answers a request.

What is modelled. The server gets its event loop, clock, random numbers, file system, threads and sockets from outside
(`kcoord.server.environment`), and the simulation passes its own:

* `loop.SimulatedLoop`, an asyncio loop on virtual time, one per process. Work for thread pools runs on it, later.
* `network.Network`, the connections between clients and the broker; `loop.UnixSockets`, those between processes.
* `kcoord.storage.memory_file_system`, the disk. It knows which bytes were synced.
* `log_writer.SimulatedLogWriter`, in place of the writer thread. It calls the functions of the real one.
* Model clients (`client`, `consumer`, `classic`, `producer`, ...), which send frames of the Kafka protocol.

Time. `clock.VirtualClock` holds all events of a run in one queue, ordered by time and then by insertion. `World.run`
takes one event after the other; time jumps to the next event and stands still while it runs. Everything runs in one
thread, so only the queue decides the order. A process reads this clock through its loop: its wall clock may be offset
after a restart, and may run at half speed.

Randomness. `World.stream(name)` seeds one generator per part from the seed and the part's name. Draws of one part
therefore do not shift those of another. `disturbances.draw` decides all crashes, pauses, cuts and changes of topics
before the run begins; each has a seed of its own.

Network. Messages of one connection stay in order and may be delayed. If one is lost, so is the rest of its connection;
the client learns of it by its timeout. A process that stands still receives its bytes later; a process that is down
receives none.

Disk. Writes and syncs fail as the options say, and a failed write may be torn. A crash of the process keeps every byte
that was written. A crash of the machine keeps what was synced and a random part of the rest, file by file.

Crash. `broker.SimulatedBroker` outlives its processes: it owns the disk, the configuration and the observer. A crash
ends the loop, so no callback, timer or write of that process runs any more. The next process composes a new broker on
the same disk and loads every shard from its log.

Checks. `world.World._step` runs one event and then `state_checks.BrokerChecks.after_step`, which looks inside the
broker. `observer.Observer` sees each record when a shard replays it, `requests.AnswerChecks` sees each frame, and
`checkers` and `ledger` hold what clients were promised. In a run with ACLs, `rights_watch` compares responses with the
plain list of ACLs in `acl_oracle`. The first violation raises `trace.ViolationError` and ends the
run. In the second phase of a run no faults happen, and all clients have to settle within a bounded time.

Replay. Every event goes through `trace.Trace.add` into a hash: equal hashes mean equal runs. A `world.Setup` (seed,
steps, scenario, families of faults, disturbances left out) is all that a run depends on, besides the commit and the
minor release of Python. `runner.shrink` removes disturbances while the same invariant still fails. Code in this package
may therefore not read a real clock, use a global random generator, or iterate over a set whose order matters.
"""
