# SPDX-License-Identifier: Apache-2.0
"""`python -m kcoord` is the `kcoord` command."""

from __future__ import annotations

import sys

from kcoord.cli import main

if __name__ == "__main__":
    sys.exit(main())
