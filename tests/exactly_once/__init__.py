# SPDX-License-Identifier: Apache-2.0
"""Applications that process exactly once through a gateway."""
