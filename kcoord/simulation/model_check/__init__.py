# SPDX-License-Identifier: Apache-2.0
"""Exhaustive check of small groups: every order of heartbeats, joins, leaves, crashes, expiries and lost messages.

Theory of operation
-------------------
A state (`model.State`) is a value: the compacted log of the coordinator, the view of each client, the messages under
way, and how often each event may still happen. `actions.steps` yields all steps from a state. The coordinator's part of
a step is the real state machine, made from the log of the state (`coordinator.restore`); clients obey KIP-848.

`search.Search` explores states breadth first and checks `properties` in each. A state is known by its fingerprint, in
which clients that differ only by their ids are equal. `docs/simulation.md` lists the limits.
"""
