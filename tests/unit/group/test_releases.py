# SPDX-License-Identifier: Apache-2.0
"""Background assignments under `kcoord.release=4.4`; the epochs of both releases are in transcripts."""

from __future__ import annotations

from tests.unit.group.group_context import GroupContext

A, B = "member-a", "member-b"


def context_of(release: str, configs: dict[str, str] | None = None) -> GroupContext:
    return GroupContext({"t3": 3, "t6": 6}, {"kcoord.release": release, **(configs or {})})


def test_background_assignments_can_be_disabled() -> None:
    """Kafka 4.4 has `consumer.assignor.offload.enable` for the broker and for one group."""
    slow = {"kcoord.assignor.inline.ms": "0"}
    for configs, group_configs, tasks in (
        ({}, {}, 1),
        ({"group.consumer.assignor.offload.enable": "false"}, {}, 0),
        ({}, {"consumer.assignor.offload.enable": "false"}, 0),
        ({"group.consumer.assignor.offload.enable": "false"}, {"consumer.assignor.offload.enable": "true"}, 1),
    ):
        context = context_of("4.4", slow | configs)
        if group_configs:
            context.group_configs["g"] = group_configs
            context.update_metadata(context.topics)
        context.join("g", A, ["t6"])
        context.join("g", B, ["t6"])
        assert len(context.tasks) == tasks, (configs, group_configs)
