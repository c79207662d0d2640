# SPDX-License-Identifier: Apache-2.0
"""The measurements of docs/performance.md: `make bench`, or `python -m bench startup requests ...` for some of them."""
