# SPDX-License-Identifier: Apache-2.0
# The extension module that protocol/hatch_build.py compiles from record_check.py.

from kcoord_protocol.record_check import DOUBTFUL as DOUBTFUL
from kcoord_protocol.record_check import check_records as check_records
from kcoord_protocol.record_check import stamp_sound_batch as stamp_sound_batch

SOURCE_SHA256: str
"""The digest of the file that was compiled."""
