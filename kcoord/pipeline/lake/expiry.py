# SPDX-License-Identifier: Apache-2.0
"""gold.expiry and gold.orphans: when offsets expire (KIP-211), and which offsets nobody needs (KIP-496).

| group | the retention of its offsets starts with |
|---|---|
| empty, has had members | the moment it became empty, or a later commit |
| empty, never had members (simple consumer) | the commit |
| with members, the topic is not subscribed | the commit |
| with members, the topic is subscribed, or the subscriptions are unknown | nothing: they do not expire |
| streams group | unknown, since its members are not read |

With Kafka's policy the offsets of an empty KIP-848 group age from their commit, and those of an empty classic group
from the moment it became empty, even if their commit was later.

If a client before KIP-211 set an expire time, it replaces the retention.
"""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake.commits import KEY
from kcoord.pipeline.lake.ends_lines import newest
from kcoord.pipeline.lake.groups import group_states, subscriptions
from kcoord.pipeline.lake.settings import ExpiryPolicy, LakeSettings
from kcoord.pipeline.lake.tables import TABLES


def build_expiry(
    current: DataFrame, epochs: DataFrame, members: DataFrame, regexes: DataFrame, settings: LakeSettings, now: datetime
) -> DataFrame:
    rows = _with_group(current, epochs, members, regexes).withColumn("now", F.lit(now))
    begins = f"if(basis = 'empty', {_empty_since(settings)}, commit_timestamp)"
    expires_at = f"""CASE
        WHEN basis = 'own' THEN expire_timestamp
        WHEN basis NOT IN ('protected', 'unknown') THEN
            timestamp_millis(unix_millis({begins}) + {settings.retention_ms})
    END"""
    rows = rows.selectExpr("*", f"{_basis(settings)} AS basis", f"{expires_at} AS expires_at")
    return TABLES["expiry"].conform(rows, expires_in_ms="unix_millis(expires_at) - unix_millis(now)")


def _with_group(current: DataFrame, epochs: DataFrame, members: DataFrame, regexes: DataFrame) -> DataFrame:
    """Adds the state of its group to each offset: `has_members`, `is_wanted` (null without members), `kind`, ...

    `is_wanted` is true if the group subscribes to the topic, or if a subscription is unknown.
    """
    states = group_states(epochs, members)
    rows = current.join(states, "group", "left").join(subscriptions(members, regexes), "group", "left")
    return rows.selectExpr(
        "*",
        "coalesce(members > 0, false) AS has_members",
        "NOT is_known OR array_contains(topics, topic) AS is_wanted",
    )


def _empty_since(settings: LakeSettings) -> str:
    if settings.expiry_policy is ExpiryPolicy.KAFKA:
        return "coalesce(empty_since, commit_timestamp)"
    return "greatest(commit_timestamp, empty_since)"


def _basis(settings: LakeSettings) -> str:
    without_members = "commit-age" if settings.expiry_policy is ExpiryPolicy.KAFKA else "empty"
    return f"""CASE
        WHEN kind = 'streams' THEN 'unknown'
        WHEN has_members AND coalesce(is_wanted, true) THEN 'protected'
        WHEN expire_timestamp IS NOT NULL THEN 'own'
        WHEN has_members THEN 'unsubscribed'
        WHEN kind IS NULL OR kind = 'classic' AND coalesce(protocol_type, '') = '' THEN 'simple'
        WHEN kind = 'consumer' THEN '{without_members}'
        ELSE 'empty'
    END"""


def build_orphans(
    current: DataFrame,
    epochs: DataFrame,
    members: DataFrame,
    regexes: DataFrame,
    expiry: DataFrame,
    ends: DataFrame,
    topics: DataFrame,
) -> DataFrame:
    """Makes `orphans`. Without samples of `ends` no topic counts as not visible.

    A topic may have been created again after it was deleted. So an offset that was committed later is not needless.
    """
    rows = _with_group(current, epochs, members, regexes).join(expiry.select(*KEY, "expires_at"), list(KEY))
    sampled = ends.select(F.lit(True).alias("is_sampled")).limit(1)
    rows = rows.join(F.broadcast(_topic_states(ends, topics)), "topic", "left").join(F.broadcast(sampled), how="left")
    reason = """CASE
        WHEN topic_state.name = 'deleted' AND commit_timestamp < topic_state.timestamp THEN 'topic-deleted'
        WHEN has_members AND NOT is_wanted THEN 'unsubscribed'
        WHEN is_sampled AND NOT topic_state.name <=> 'listed' THEN 'topic-not-visible'
    END"""
    return TABLES["orphans"].conform(rows, reason=reason).where("reason IS NOT NULL")


def _topic_states(ends: DataFrame, topics: DataFrame) -> DataFrame:
    """Returns the newest state of each topic name. A topic that was created again at the same time is `listed`."""
    sampled = newest(ends).selectExpr("topic", "timestamp", "'listed' AS name")
    states = topics.selectExpr("topic", "timestamp", "state AS name").unionByName(sampled)
    return states.groupBy("topic").agg(F.max(F.struct("timestamp", "name")).alias("topic_state"))
