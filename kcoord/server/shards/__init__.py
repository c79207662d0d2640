# SPDX-License-Identifier: Apache-2.0
"""The services that handlers call, and the pump that drives their shards with the clock."""
