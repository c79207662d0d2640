# SPDX-License-Identifier: Apache-2.0
"""Broker keys that change nothing here because this broker works in another way. Each says why.

They are accepted and checked as those of `ignored_keys`, of which nothing more has to be said.
"""

from __future__ import annotations

from kcoord.config.key import (
    ConfigKey,
    ConfigType,
    ConfigValue,
    Importance,
    ListOf,
    UpdateMode,
    Validator,
    at_least,
)

BOOLEAN = ConfigType.BOOLEAN
STRING = ConfigType.STRING
INT = ConfigType.INT
LONG = ConfigType.LONG
LIST = ConfigType.LIST
HIGH = Importance.HIGH
MEDIUM = Importance.MEDIUM
LOW = Importance.LOW
READ_ONLY = UpdateMode.READ_ONLY
PER_BROKER = UpdateMode.PER_BROKER
CLUSTER_WIDE = UpdateMode.CLUSTER_WIDE

WITHOUT_EFFECT = "Accepted without effect: "

_NO_SASL = "clients do not authenticate here."
_NO_REPLICAS = "there is one copy of each partition, which is always in sync."
_SLICES = "logs are read in small pieces while they are loaded, so that other requests are answered in between."


def _unneeded(
    name: str,
    type_: ConfigType,
    default: ConfigValue,
    validator: Validator | None,
    importance: Importance,
    why: str,
    update_mode: UpdateMode = READ_ONLY,
) -> ConfigKey:
    doc = WITHOUT_EFFECT + why
    return ConfigKey(name, type_, default, validator, importance, doc, update_mode, honoured=False)


UNNEEDED_KEYS: tuple[ConfigKey, ...] = (
    _unneeded("connection.failed.authentication.delay.ms", INT, 100, at_least(0), LOW, _NO_SASL),
    _unneeded("connections.max.reauth.ms", LONG, 0, None, MEDIUM, _NO_SASL),
    _unneeded(
        "group.coordinator.cached.buffer.max.bytes",
        INT,
        1048588,
        at_least(524288),
        MEDIUM,
        "no write buffer is kept for the next write.",
        CLUSTER_WIDE,
    ),
    _unneeded(
        "inter.broker.listener.name",
        STRING,
        None,
        None,
        MEDIUM,
        "it must name one of the listeners, but workers talk to each other over sockets of their own.",
    ),
    _unneeded(
        "log.preallocate",
        BOOLEAN,
        False,
        None,
        MEDIUM,
        "segment files grow with what is written to them.",
        CLUSTER_WIDE,
    ),
    _unneeded(
        "metadata.log.dir",
        STRING,
        None,
        None,
        HIGH,
        "the metadata log is in the first folder of log.dirs, and shares its lock and its journal.",
    ),
    _unneeded(
        "num.recovery.threads.per.data.dir",
        INT,
        2,
        at_least(1),
        HIGH,
        "a log is recovered when it is opened.",
        CLUSTER_WIDE,
    ),
    _unneeded("offsets.load.buffer.size", INT, 5242880, at_least(1), HIGH, _SLICES),
    _unneeded(
        "process.roles",
        LIST,
        ["broker", "controller"],
        ListOf(("broker", "controller")),
        HIGH,
        "the process is always broker and controller.",
    ),
    _unneeded(
        "queued.max.request.bytes",
        LONG,
        -1,
        None,
        MEDIUM,
        "requests do not queue: each is worked on in the turn of the event loop that reads it.",
    ),
    _unneeded(
        "queued.max.requests",
        INT,
        500,
        at_least(1),
        HIGH,
        "requests do not queue: each is worked on in the turn of the event loop that reads it. A connection with 64 "
        "requests that are not answered is not read from.",
    ),
    _unneeded("sasl.enabled.mechanisms", LIST, ["GSSAPI"], None, MEDIUM, _NO_SASL, PER_BROKER),
    _unneeded("sasl.oauthbearer.expected.audience", LIST, [], None, HIGH, _NO_SASL),
    _unneeded("sasl.oauthbearer.expected.issuer", STRING, None, None, HIGH, _NO_SASL),
    _unneeded("sasl.oauthbearer.jwks.endpoint.url", STRING, None, None, MEDIUM, _NO_SASL),
    _unneeded("sasl.server.max.receive.size", INT, 524288, None, MEDIUM, _NO_SASL),
    _unneeded(
        "transaction.abort.timed.out.transaction.cleanup.interval.ms",
        INT,
        10000,
        at_least(1),
        LOW,
        "each transaction has a timer, and is aborted when its timeout is over.",
    ),
    _unneeded("transaction.state.log.load.buffer.size", INT, 5242880, at_least(1), HIGH, _SLICES),
    _unneeded("transaction.state.log.min.isr", INT, 1, at_least(1), HIGH, _NO_REPLICAS),
    _unneeded(
        "transaction.two.phase.commit.enable", BOOLEAN, False, None, LOW, "there are no two-phase commits (KIP-939)."
    ),
    _unneeded("unclean.leader.election.enable", BOOLEAN, False, None, HIGH, _NO_REPLICAS, CLUSTER_WIDE),
)
