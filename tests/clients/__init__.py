# SPDX-License-Identifier: Apache-2.0
"""Runs clients of other languages against kcoord: `make test-clients`."""
