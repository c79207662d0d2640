# SPDX-License-Identifier: Apache-2.0
"""gold.expiry and gold.orphans: when offsets expire (KIP-211), and which offsets nobody needs (KIP-496).

| group | the retention of its offsets starts with |
|---|---|
| empty, has had members | the moment it became empty, or a later commit |
| empty, never had members (simple consumer) | the commit |
| with members, the topic is not subscribed | the commit |
| with members, the topic is subscribed, or the subscriptions are unknown | nothing: they do not expire |
| streams group | unknown, since its members are not read |

If a client before KIP-211 set an expire time, it replaces the retention.
"""

from __future__ import annotations

from datetime import datetime

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from kcoord.pipeline.lake.commits import KEY
from kcoord.pipeline.lake.ends_lines import newest
from kcoord.pipeline.lake.groups import group_states, subscriptions
from kcoord.pipeline.lake.settings import ExpiryPolicy, LakeSettings
from kcoord.pipeline.lake.tables import TABLES


def build_expiry(
    current: DataFrame, epochs: DataFrame, members: DataFrame, regexes: DataFrame, settings: LakeSettings, now: datetime
) -> DataFrame:
    rows = _with_group(current, epochs, members, regexes)
    rows = rows.withColumn("basis", _basis(settings))
    begins = F.when(F.col("basis") == "empty", F.greatest("commit_timestamp", "empty_since")).otherwise(
        F.col("commit_timestamp")
    )
    due = F.when(F.col("basis") == "own", F.col("expire_timestamp")).when(
        ~F.col("basis").isin("protected", "unknown"), F.timestamp_millis(F.unix_millis(begins) + settings.retention_ms)
    )
    rows = rows.withColumn("expires_at", due)
    left = F.unix_millis("expires_at") - F.unix_millis(F.lit(now))
    return TABLES["expiry"].conform(rows.withColumn("expires_in_ms", left))


def _with_group(current: DataFrame, epochs: DataFrame, members: DataFrame, regexes: DataFrame) -> DataFrame:
    """Adds the state of its group to each offset: `has_members`, `is_wanted` (null without members), `kind`, ...

    `is_wanted` is true if the group subscribes to the topic, or if a subscription is unknown.
    """
    states = group_states(epochs, members)
    rows = current.join(states, "group", "left").join(subscriptions(members, regexes), "group", "left")
    return rows.withColumns(
        {
            "has_members": F.coalesce(F.col("members") > 0, F.lit(False)),
            "is_wanted": ~F.col("is_known") | F.array_contains("topics", F.col("topic")),
        }
    )


def _basis(settings: LakeSettings) -> Column:
    is_simple = F.col("kind").isNull() | ((F.col("kind") == "classic") & (F.coalesce("protocol_type", F.lit("")) == ""))
    by_commit = F.lit(settings.expiry_policy is ExpiryPolicy.KAFKA) & (F.col("kind") == "consumer")
    return (
        F.when(F.col("kind") == "streams", "unknown")
        .when(F.col("has_members") & F.coalesce("is_wanted", F.lit(True)), "protected")
        .when(F.col("expire_timestamp").isNotNull(), "own")
        .when(F.col("has_members"), "unsubscribed")
        .when(is_simple, "simple")
        .when(by_commit, "commit-age")
        .otherwise("empty")
    )


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
    is_deleted = (F.col("topic_state.name") == "deleted") & (F.col("commit_timestamp") < F.col("topic_state.timestamp"))
    is_visible = F.coalesce(F.col("topic_state.name") == "listed", F.lit(False))
    reason = (
        F.when(is_deleted, "topic-deleted")
        .when(F.col("has_members") & ~F.col("is_wanted"), "unsubscribed")
        .when(F.col("is_sampled") & ~is_visible, "topic-not-visible")
    )
    return TABLES["orphans"].conform(rows.withColumn("reason", reason).where("reason IS NOT NULL"))


def _topic_states(ends: DataFrame, topics: DataFrame) -> DataFrame:
    """Returns the newest state of each topic name. A topic that was created again at the same time is `listed`."""
    sampled = newest(ends).select("topic", "timestamp", F.lit("listed").alias("state"))
    states = topics.select("topic", "timestamp", "state").unionByName(sampled)
    return states.groupBy("topic").agg(F.max(F.struct("timestamp", F.col("state").alias("name"))).alias("topic_state"))
