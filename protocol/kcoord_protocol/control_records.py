# SPDX-License-Identifier: Apache-2.0
"""Keys and values of control records. They mark the end of transactions (KIP-98), and snapshots, in a log."""

from __future__ import annotations

from enum import IntEnum
from struct import Struct
from typing import Final, cast

from kcoord_protocol.errors import CorruptBatchError

_KEY: Final = Struct(">hh")
_END_TXN_VALUE: Final = Struct(">hi")


class ControlRecordType(IntEnum):
    """The type of a control record. Only ABORT and COMMIT occur in topics."""

    ABORT = 0
    COMMIT = 1
    LEADER_CHANGE = 2
    SNAPSHOT_HEADER = 3
    SNAPSHOT_FOOTER = 4
    KRAFT_VERSION = 5
    KRAFT_VOTERS = 6


def control_key(control_type: ControlRecordType) -> bytes:
    """Write the key of a control record: key version 0 and the type."""
    return _KEY.pack(0, control_type)


def decode_control_key(key: bytes | None) -> ControlRecordType | None:
    """Read the key of a control record; return None for an unknown type, which readers must skip."""
    if key is None or len(key) < _KEY.size:
        raise CorruptBatchError("the key of a control record is too short")
    version, control_type = _KEY.unpack_from(key)
    if version < 0:
        raise CorruptBatchError(f"the key of a control record has version {version}")
    return _CONTROL_TYPES.get(control_type)


def end_txn_marker(coordinator_epoch: int) -> bytes:
    """Write the value of an ABORT or COMMIT record: version 0 and the epoch of the transaction coordinator."""
    return _END_TXN_VALUE.pack(0, coordinator_epoch)


def decode_end_txn_marker(value: bytes | None) -> int:
    """Read the coordinator epoch. Newer versions may have more fields after it."""
    if value is None or len(value) < _END_TXN_VALUE.size or value[0] & 0x80:
        raise CorruptBatchError("the value of an end transaction marker is not valid")
    _, epoch = _END_TXN_VALUE.unpack_from(value)
    return cast(int, epoch)


_CONTROL_TYPES: Final = {int(control_type): control_type for control_type in ControlRecordType}
