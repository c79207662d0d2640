# SPDX-License-Identifier: Apache-2.0
"""Soak tests: faults under real clients, which record every acknowledged write and check it afterwards."""
