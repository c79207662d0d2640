# SPDX-License-Identifier: Apache-2.0
"""The admin client: one module per family of calls, one class that offers them all."""
