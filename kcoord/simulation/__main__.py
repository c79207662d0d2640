# SPDX-License-Identifier: Apache-2.0
"""`python -m kcoord.simulation`; see `runner`."""

from __future__ import annotations

import sys

from kcoord.simulation.runner import main

if __name__ == "__main__":
    sys.exit(main())
