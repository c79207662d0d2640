# SPDX-License-Identifier: Apache-2.0
"""Settings of all tests: Hypothesis never fails because the machine is busy."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("kcoord", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("kcoord")
