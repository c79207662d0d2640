# SPDX-License-Identifier: Apache-2.0
"""Selects the form of `record_check`: the compiled one if this installation has it, else the pure one.

A platform wheel has the extension module `compiled_record_check`, a pure wheel does not. The forms differ in speed
only.
"""

from __future__ import annotations

from typing import Final

try:
    from kcoord_protocol import compiled_record_check as record_check
except ImportError:
    from kcoord_protocol import record_check  # type: ignore[no-redef]

check_records = record_check.check_records
stamp_sound_batch = record_check.stamp_sound_batch
IS_COMPILED: Final = record_check.__name__.endswith("compiled_record_check")
