# SPDX-License-Identifier: Apache-2.0
"""Bytes that nobody should send: made from schemas, from recorded requests and from what was found before."""
