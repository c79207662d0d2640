# SPDX-License-Identifier: Apache-2.0
"""Listeners, connections, limits on connections, and the path from request bytes to response bytes."""
