# SPDX-License-Identifier: Apache-2.0
"""The report: one page of HTML with everything in it."""
