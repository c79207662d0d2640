# SPDX-License-Identifier: Apache-2.0
"""Files to give to spark-submit."""
