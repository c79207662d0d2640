# SPDX-License-Identifier: Apache-2.0
"""The producer: pure partitioning and batching, and a sender that drives them."""
