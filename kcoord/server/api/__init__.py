# SPDX-License-Identifier: Apache-2.0
"""The API table with versions and request contexts, the handlers, and functions that several handlers share."""
