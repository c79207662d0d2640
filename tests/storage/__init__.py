# SPDX-License-Identifier: Apache-2.0
"""Logs and data folders under every fault that a disk or a crash can cause."""
