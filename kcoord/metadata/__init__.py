# SPDX-License-Identifier: Apache-2.0
"""Topics, partitions, configs and brokers of the cluster: an image that is replayed from a log of metadata records.

`machine` is the state machine of that log, and `image` its state. The other modules are pure functions from an image
and a request to records and a response. They read no clock and no file, and change nothing.
"""
