# SPDX-License-Identifier: Apache-2.0
"""`python -m bench.pure COMMAND ...`: runs a command of kcoord in its pure form, also if this checkout is compiled."""

from __future__ import annotations

import sys

# The import of a module that is None fails, as if it did not exist.
sys.modules["kcoord_protocol.compiled_record_check"] = None  # type: ignore[assignment]

if __name__ == "__main__":
    from kcoord.cli import main

    sys.exit(main())
