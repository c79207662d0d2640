# SPDX-License-Identifier: Apache-2.0
"""Selects the form of `record_check`: the compiled one if this installation has it, else the pure one.

A platform wheel has the extension module `compiled_record_check`, a pure wheel does not. The forms differ in speed
only.
"""

from __future__ import annotations

from typing import Final

try:
    # An old module, which was compiled before a function existed, counts as none.
    from kcoord_protocol.compiled_record_check import check_records, stamp_sound_batch
except ImportError:
    from kcoord_protocol.record_check import check_records, stamp_sound_batch

__all__ = ["IS_COMPILED", "check_records", "stamp_sound_batch"]

IS_COMPILED: Final = check_records.__module__.endswith("compiled_record_check")
