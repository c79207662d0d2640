# SPDX-License-Identifier: Apache-2.0
"""Selects the form of `record_check`: the compiled one if this installation has it, else the pure one.

A platform wheel has the extension module `compiled_record_check`, a pure wheel does not. The forms differ in speed
only. In a checkout the module may be of an earlier source, which checked other things. It is not used then.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from kcoord_protocol import record_check


def _compiled_digest() -> str | None:
    """Returns the digest of the source that was compiled, None if there is no compiled module."""
    try:
        from kcoord_protocol import compiled_record_check
    except ImportError:
        return None
    return compiled_record_check.SOURCE_SHA256


def _is_of_this_source(digest: str) -> bool:
    """Also True for an installation without sources."""
    source = Path(record_check.__file__)
    return source.suffix != ".py" or not source.exists() or hashlib.sha256(source.read_bytes()).hexdigest() == digest


_digest = _compiled_digest()
IS_COMPILED: Final = _digest is not None and _is_of_this_source(_digest)
IS_OUTDATED: Final = _digest is not None and not IS_COMPILED
"""True if there is a compiled module, but of another source."""

if IS_COMPILED:
    from kcoord_protocol.compiled_record_check import check_records, stamp_sound_batch
else:
    from kcoord_protocol.record_check import check_records, stamp_sound_batch

__all__ = ["IS_COMPILED", "IS_OUTDATED", "check_records", "stamp_sound_batch"]
