# SPDX-License-Identifier: Apache-2.0
"""What the broker and its client share about security: keys and certificates, SASL, and the names that they prove.

Nothing here has a socket, an event loop or a clock. Key files are read when a function is called, not later.
"""
