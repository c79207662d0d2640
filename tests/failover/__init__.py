# SPDX-License-Identifier: Apache-2.0
"""Instances in front of an upstream that are killed, stopped, paused and cut off, with a ledger of all commits.

`make failover` runs the long forms: 2,000 members, and 1,000,000 offsets in the log.
"""
