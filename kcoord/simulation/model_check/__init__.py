# SPDX-License-Identifier: Apache-2.0
"""Exhaustive check of small groups: every order of heartbeats, joins, leaves, crashes, expiries and lost messages, on
the real state machine. See `docs/simulation.md`.
"""
