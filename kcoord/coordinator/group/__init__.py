# SPDX-License-Identifier: Apache-2.0
"""The pure core of the group coordinator. `shard` maps state and request to records and response.

It has no clock, no randomness and no IO.
"""
