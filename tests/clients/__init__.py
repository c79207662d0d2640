# SPDX-License-Identifier: Apache-2.0
"""Clients of other languages in groups of a kcoord process: `make test-clients`."""
