# SPDX-License-Identifier: Apache-2.0
"""The deterministic simulation as a test."""
