# SPDX-License-Identifier: Apache-2.0
"""The pure core of the group coordinator: state and request in, records and response out; no clock, no randomness,
no IO.
"""
