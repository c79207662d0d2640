# SPDX-License-Identifier: Apache-2.0
"""Committed offsets: `operations` has the theory, `committed_offsets` the state, `packed_*` the fast paths."""
