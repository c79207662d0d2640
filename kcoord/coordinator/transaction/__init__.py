# SPDX-License-Identifier: Apache-2.0
"""The pure core of the transaction coordinator (KIP-98, KIP-890): one shard per partition of `__transaction_state`."""
