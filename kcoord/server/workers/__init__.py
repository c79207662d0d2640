# SPDX-License-Identifier: Apache-2.0
"""Several worker processes of one broker process: their supervisor, and the links between them."""
