# SPDX-License-Identifier: Apache-2.0
"""A later release of kcoord: `python -m tests.failover.next_release` is its `kcoord`.

It reads records about groups of one version more, and differs from this release in nothing else: the value of a
committed offset has `VALUE_VERSION`, with a text before the other fields. Like any release it writes them as soon as
the log that all instances share has the version.
"""

from __future__ import annotations

import sys
from typing import Final

from kcoord.runtime import serde, shard_map
from kcoord.runtime.result import CoordinatorRecord
from kcoord_protocol.messages import (
    OffsetCommitKey,
    OffsetCommitValue,
    SharedRecordVersionKey,
    SharedRecordVersionValue,
)

RECORD_VERSION: Final = shard_map.RECORD_VERSION + 1
VALUE_VERSION: Final = max(OffsetCommitValue.valid_versions) + 1
_VERSION_BYTES: Final = 2
_NOTE: Final = b"note"


def decode_commit(value: bytes) -> tuple[OffsetCommitValue, int]:
    """Returns the value of a committed offset, and its version, which is that of this release or of any earlier one."""
    version = int.from_bytes(value[:_VERSION_BYTES])
    if version == VALUE_VERSION:
        return OffsetCommitValue.decode(value[_VERSION_BYTES + len(_NOTE) :], VALUE_VERSION - 1), version
    return OffsetCommitValue.decode(value[_VERSION_BYTES:], version), version


class NextSerde(serde.CoordinatorSerde):
    """The records of this release."""

    written_version = 0
    """The record version that the instances share."""

    def serialize(self, record: CoordinatorRecord) -> serde.SerializedRecord:
        key, value = super().serialize(record)
        if isinstance(record.value, OffsetCommitValue) and NextSerde.written_version >= RECORD_VERSION:
            value = VALUE_VERSION.to_bytes(_VERSION_BYTES) + _NOTE + record.value.encode(VALUE_VERSION - 1)
        return key, value

    def deserialize(self, key: bytes | None, value: bytes | None) -> CoordinatorRecord | None:
        if value is not None and value.startswith(VALUE_VERSION.to_bytes(_VERSION_BYTES) + _NOTE):
            record = super().deserialize(key, None)
            if record is not None and isinstance(record.key, OffsetCommitKey):
                return CoordinatorRecord(record.key, *decode_commit(value))
        record = super().deserialize(key, value)
        match record:
            case CoordinatorRecord(key=SharedRecordVersionKey(), value=SharedRecordVersionValue() as version):
                NextSerde.written_version = max(NextSerde.written_version, version.record_version)
        return record


def main() -> int:
    # These are changed before any other module imports their names.
    vars(shard_map)["RECORD_VERSION"] = RECORD_VERSION
    vars(serde)["CoordinatorSerde"] = NextSerde
    from kcoord.cli import main as kcoord
    from kcoord.coordinator.group.offsets.packed_commit import CommitPlan

    def is_not_packed(*_: object) -> bool:
        return False

    # Packed commits encode values without a serde.
    vars(sys.modules[CommitPlan.__module__])["CommitPlan"].prepare = is_not_packed
    return kcoord()


if __name__ == "__main__":
    sys.exit(main())
