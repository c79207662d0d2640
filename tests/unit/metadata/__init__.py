# SPDX-License-Identifier: Apache-2.0
"""Tests of the metadata machine, of its image, and of the handlers that answer from them."""
