# SPDX-License-Identifier: Apache-2.0
"""Time travel: the state of every group at a moment."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake import current
from kcoord.pipeline.lake.groups import as_of, group_states
from kcoord.pipeline.lake.jobs import SILVER, Jobs
from kcoord.pipeline.lake.storage import Lake

_OFFSETS: Final = ("group", "topic", "partition", "committed_offset", "metadata", "commit_timestamp", "incarnation")
_GROUPS: Final = ("group", "incarnation", "kind", "state", "epoch", "members", "protocol_type", "protocol")
_MEMBERS: Final = (
    "group",
    "member_id",
    "instance_id",
    "client_id",
    "client_host",
    "subscribed_topics",
    "subscribed_regex",
    "from_timestamp",
)
_ASSIGNMENTS: Final = ("group", "member_id", "kind", "topic", "topic_id", "partition", "is_revoking", "from_timestamp")


@dataclass(frozen=True, slots=True)
class GroupsAsOf:
    """The state at the moment: committed offsets, groups, members, and current and target assignments (`kind`)."""

    offsets: DataFrame
    groups: DataFrame
    members: DataFrame
    assignments: DataFrame


def snapshot(lake: Lake, jobs: Jobs, moment: datetime, groups: tuple[str, ...] = ()) -> GroupsAsOf:
    """Returns the state after all records up to the moment, for the given groups or for all groups.

    A transaction counts from its marker on. Updates the silver tables first.
    """
    jobs.ensure_all(SILVER)

    def table(name: str) -> DataFrame:
        frame = lake.read(name)
        return frame.where(F.col("group").isin(*groups)) if groups else frame

    commits = table("commits").where(F.col("effective_timestamp") <= F.lit(moment))
    states = group_states(table("group_epochs"), table("members"), moment)
    return GroupsAsOf(
        current.build(commits).select(*_OFFSETS).orderBy("group", "topic", "partition"),
        states.select(*_GROUPS).orderBy("group"),
        as_of(table("members"), moment).select(*_MEMBERS).orderBy("group", "member_id"),
        as_of(table("assignments"), moment)
        .select(*_ASSIGNMENTS)
        .orderBy("group", "kind", "topic", "partition", "member_id"),
    )
