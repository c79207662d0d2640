# SPDX-License-Identifier: Apache-2.0
"""`python -m bench [NAME ...]`: runs the named measurements, or all, and prints Markdown tables."""

from __future__ import annotations

import sys

from bench import assignors, classic, compaction, heartbeats, recovery, startup

MEASUREMENTS = {
    "startup": startup.main,
    "heartbeats": heartbeats.main,
    "assignors": assignors.main,
    "classic": classic.main,
    "recovery": recovery.main,
    "compaction": compaction.main,
}

for name in sys.argv[1:] or MEASUREMENTS:
    print(f"\n{name}\n")
    MEASUREMENTS[name]()
