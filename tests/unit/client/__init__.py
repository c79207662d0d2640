# SPDX-License-Identifier: Apache-2.0
"""The client's pure parts, and its shell against a broker made of canned answers."""
