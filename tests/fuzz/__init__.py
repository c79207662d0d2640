# SPDX-License-Identifier: Apache-2.0
"""Fuzzing with requests from schemas, recorded requests and earlier findings."""
