# SPDX-License-Identifier: Apache-2.0
"""The consumer: pure state machines for membership, classification and positions, and a shell that drives them."""
