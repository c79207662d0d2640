# SPDX-License-Identifier: Apache-2.0
"""Measures, and the page that shows them."""
