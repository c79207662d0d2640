# SPDX-License-Identifier: Apache-2.0
"""Broker keys of idempotent producers and transactions."""

from __future__ import annotations

from kcoord.config.key import (
    ConfigKey,
    ConfigType,
    Importance,
    UpdateMode,
    at_least,
)

BOOLEAN = ConfigType.BOOLEAN
INT = ConfigType.INT
SHORT = ConfigType.SHORT
HIGH = Importance.HIGH
LOW = Importance.LOW
CLUSTER_WIDE = UpdateMode.CLUSTER_WIDE

TRANSACTION_KEYS: tuple[ConfigKey, ...] = (
    ConfigKey(
        "producer.id.expiration.check.interval.ms",
        INT,
        600000,
        at_least(1),
        LOW,
        "How often expired producer ids are looked for.",
        internal=True,
    ),
    ConfigKey(
        "producer.id.expiration.ms",
        INT,
        86400000,
        at_least(1),
        LOW,
        "A partition forgets an idempotent producer after this time without writes.",
        update_mode=CLUSTER_WIDE,
    ),
    ConfigKey(
        "transaction.max.timeout.ms",
        INT,
        900000,
        at_least(1),
        HIGH,
        "Longest transaction timeout that a producer may ask for.",
    ),
    ConfigKey(
        "transaction.partition.verification.enable",
        BOOLEAN,
        True,
        None,
        LOW,
        "Whether a transactional write needs its partition to be part of the transaction.",
        update_mode=CLUSTER_WIDE,
    ),
    ConfigKey(
        "transaction.remove.expired.transaction.cleanup.interval.ms",
        INT,
        3600000,
        at_least(1),
        LOW,
        "How often expired transactional ids are looked for.",
    ),
    ConfigKey(
        "transaction.state.log.num.partitions",
        INT,
        50,
        at_least(1),
        HIGH,
        "Partitions of the transaction coordinator's log.",
    ),
    ConfigKey(
        "transaction.state.log.replication.factor",
        SHORT,
        1,
        at_least(1),
        HIGH,
        "Replicas of the transaction log, at most one for each worker. They are nominal: one copy is kept.",
    ),
    ConfigKey(
        "transaction.state.log.segment.bytes",
        INT,
        104857600,
        at_least(1),
        HIGH,
        "Segment size of the transaction coordinator's log.",
    ),
    ConfigKey(
        "transactional.id.expiration.ms",
        INT,
        604800000,
        at_least(1),
        HIGH,
        "A transactional id is forgotten after this time without use.",
    ),
)
