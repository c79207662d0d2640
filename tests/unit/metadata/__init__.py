# SPDX-License-Identifier: Apache-2.0
"""The metadata machine, its image, and the handlers that answer from them."""
