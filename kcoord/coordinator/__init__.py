# SPDX-License-Identifier: Apache-2.0
"""The pure cores of the group coordinator (`group`) and of the transaction coordinator (`transaction`)."""
