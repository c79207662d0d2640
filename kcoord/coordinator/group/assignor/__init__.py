# SPDX-License-Identifier: Apache-2.0
"""Server-side assignors (KIP-848 "Assignor Selection").

They are pure functions from members and partition counts to a target assignment.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from kcoord.coordinator.group.assignor.range import RangeAssignor
from kcoord.coordinator.group.assignor.spec import Assignment, Assignor, MemberSpec, PartitionRacks
from kcoord.coordinator.group.assignor.uniform import UniformAssignor
from kcoord.coordinator.group.assignor.uniform_rack import UniformRackAssignor

ASSIGNORS: Final[Mapping[str, Assignor]] = MappingProxyType(
    {assignor.name: assignor for assignor in (UniformAssignor(), RangeAssignor(), UniformRackAssignor())}
)
"""The built-in assignors by name."""

__all__ = ["ASSIGNORS", "Assignment", "Assignor", "MemberSpec", "PartitionRacks"]
