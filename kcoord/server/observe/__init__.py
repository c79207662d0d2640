# SPDX-License-Identifier: Apache-2.0
"""Metrics, client telemetry and loggers."""
