# SPDX-License-Identifier: Apache-2.0
"""Groups of the consumer rebalance protocol (KIP-848): `group` has the state and its theory, `heartbeat` the steps."""
