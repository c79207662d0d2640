# SPDX-License-Identifier: Apache-2.0
"""The options that a seed draws before a run: the mix of faults, the limits and the size of the world.

Each seed draws its own mix (swarm testing), because a mix of all faults at once hides those that need quiet.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from random import Random
from typing import Final

from kcoord.config import BrokerConfig
from kcoord.config.broker_settings import KNOWN_CONSUMER_ASSIGNORS
from kcoord.runtime.serde import partition_for

MEMBERS_PER_GROUP = 3
TOMBSTONES_KEPT_MS: Final = 5_000
MOST_ASSIGNOR_BYTES: Final = 100
"""Most bytes of metadata that a member gives to a client-side assignor, or gets from one."""
MOST_GROUP_ASSIGNOR_BYTES: Final = 200
RUDE_GROUPS: Final = ("rude-0", "rude-1", "rude-2")
COMMITTER_GROUP: Final = "committers"
PRODUCER_GROUP: Final = "producers"
PIPELINE_GROUP: Final = "pipeline"
LEAVER_GROUP: Final = "leavers"
GUEST_GROUPS: Final = ("guests-0", "guests-1")
GUEST_MEMBER_GROUPS: Final = ("guest-members-0", "guest-members-1")
_GROUPS: Final = ("group-0", "group-1", COMMITTER_GROUP, PRODUCER_GROUP, PIPELINE_GROUP, LEAVER_GROUP, *RUDE_GROUPS)
"""The broker has to lead the shards of these groups."""
_SHARED_SHARDS: Final = 6
SUPER_USER: Final = "User:root"
_AUTHORIZER: Final = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"

FAULTS: Final = (
    "network",
    "disk",
    "crash",
    "pause",
    "shard",
    "clock",
    "member",
    "topic",
    "config",
    "admin",
    "rude",
    "lull",
    "acl",
    "quota",
    "upstream",
)
"""The families of faults that `--faults` can choose from."""


@dataclass(slots=True)
class Options:
    """Probabilities are per message or per disk operation; 0 switches a fault off. Times are virtual milliseconds."""

    protocols: tuple[str, ...]
    """One group per entry: "consumer", "classic", or "mixed" if its members change their protocol."""
    shards: int
    partitions: int
    segment_bytes: int
    heartbeat_interval_ms: int
    session_timeout_ms: int
    rebalance_timeout_ms: int
    assignment_interval_ms: int
    network_delay_ms: int
    disk_delay_ms: int
    drop_probability: float
    duplicate_probability: float
    delay_probability: float
    disk_error_probability: float
    every_ms: Mapping[str, int]
    """Mean time between disturbances, by family (`disturbances.KINDS`); 0 for never."""
    static_share: float
    producers: int
    clean_every_ms: int
    snapshot_bytes: int
    """Growth of a log between two snapshots; 0 writes snapshots only at an orderly stop."""
    most_members: int
    expiration_policy: str
    migration_policy: str
    verification: bool
    """`transaction.partition.verification.enable`: the transaction coordinator verifies TxnOffsetCommit of older
    versions, too (KIP-890).
    """
    inline_ms: int
    """`kcoord.assignor.inline.ms`: slower assignments run in the background; 0 for all of them."""
    record_producers: int = 0
    """Number of clients that append records; if there are any, two readers run, too."""
    hop_ms: int = 0
    """Delay of the transaction coordinator's answer to the group coordinator, as if on another worker."""
    most_groups: int = 100_000
    """Most groups of one shard (`kcoord.partition.max.groups`)."""
    migration_policies: tuple[str, ...] = ()
    """Migration policies of successive processes, by turns; empty if all have `migration_policy`."""
    turn_ms: int = 0
    """Length of a turn of the broker's event loop, which batches arrivals; with 0 each arrival has its own turn."""
    fast_paths: bool = True
    has_foreign_shards: bool = False
    """Whether another broker leads some of the group coordinator's partitions; requests for them are misrouted."""
    transaction_shards: int = 2
    request_timeout_ms: int = 2_000
    retention_check_ms: int = 5_000
    assignor: str = ""
    """What `group.consumer.assignors` begins with, and the only assignor that members use; empty for the default."""
    has_acls: bool = False
    """Whether the brokers have an authorizer, and guests, whose ACLs and quotas change."""
    has_client_assignors: bool = False
    """Whether members of the consumer protocol have client-side assignors."""
    fallback: str = "wait"
    """`kcoord.client.assignor.fallback`: what follows if all able members have failed to compute."""
    conducts: str = "any"
    """How members compute: see `assignor_member.CONDUCTS`."""

    @classmethod
    def draw(cls, random: Random, scenario: str = "", faults: frozenset[str] | None = None) -> Options:
        """Draws the options of one seed. Then the scenario overrides some, and `faults` keeps the families named."""
        choice = random.choice
        options = cls(
            protocols=choice(
                (
                    ("consumer",),
                    ("classic",),
                    ("mixed",),
                    ("consumer", "classic"),
                    ("consumer", "mixed"),
                    ("mixed",) * 2,
                )
            ),
            shards=choice((1, 2, 3)),
            partitions=choice((2, 3, 4, 6)),
            segment_bytes=choice((2_048, 8_192, 16_384, 1 << 20)),
            heartbeat_interval_ms=choice((500, 1_000, 3_000)),
            session_timeout_ms=choice((10_000, 15_000)),
            rebalance_timeout_ms=choice((5_000, 20_000)),
            assignment_interval_ms=choice((0, 0, 1_000)),
            network_delay_ms=choice((2, 50, 300)),
            disk_delay_ms=choice((1, 10, 200)),
            drop_probability=choice((0.0, 0.01, 0.05)),
            duplicate_probability=choice((0.0, 0.02, 0.1)),
            delay_probability=choice((0.0, 0.0, 0.01)),
            disk_error_probability=choice((0.0, 0.0, 0.01)),
            every_ms={
                "broker": choice((0, 8_000, 20_000)),
                "pause": choice((0, 0, 15_000)),
                "shard": choice((0, 0, 6_000)),
                "member": choice((3_000, 10_000)),
                "partition": choice((0, 0, 8_000)),
                "topic": choice((0, 5_000, 15_000)),
                "config": choice((0, 10_000)),
                "admin": choice((0, 1_000, 5_000)),
                "rude": choice((0, 60, 200)),
                "lull": choice((0, 0, 0, 25_000)),
                "controller": 0,
                "acl": 0,
                "quota": 0,
            },
            static_share=choice((0.0, 0.3, 1.0)),
            producers=choice((0, 1, 2)),
            clean_every_ms=choice((0, 1_500, 6_000)),
            snapshot_bytes=choice((0, 3_000, 9_000)),
            most_members=choice((3, 4, 200)),
            expiration_policy=choice(("kip211", "kafka")),
            migration_policy=choice(("bidirectional", "bidirectional", "bidirectional", "disabled")),
            verification=choice((True, True, False)),
            inline_ms=choice((0, 10)),
            hop_ms=choice((0, 0, 20)),
            turn_ms=choice((0, 0, 1)),
            fast_paths=choice((True, True, True, True, False)),
            has_foreign_shards=choice((False, False, True)),
            record_producers=choice((0, 0, 2, 3)),
            # The last draws, so that the seeds without these parts are the runs that they were before.
            has_acls=random.random() < 0.125,
            has_client_assignors=random.random() < 0.125,
            fallback=choice(("wait", "wait", "server")),
            conducts=choice(("any", "lying", "silent", "failing")),
        )
        if options.has_acls:
            options.every_ms = {**options.every_ms, "acl": 2_000, "quota": 4_000}
        SCENARIOS[scenario](options)
        if "mixed" in options.protocols:
            options.migration_policy = "bidirectional"
        if faults is not None:
            options._keep_only(faults)
        return options

    @property
    def group_partitions(self) -> int:
        """Number of partitions of __consumer_offsets."""
        return _SHARED_SHARDS if self.has_foreign_shards else self.shards

    @property
    def own_shards(self) -> list[int]:
        """The shards of the group coordinator that the broker leads."""
        if not self.has_foreign_shards:
            return list(range(self.shards))
        groups = (*_GROUPS, *GUEST_GROUPS, *GUEST_MEMBER_GROUPS) if self.has_acls else _GROUPS
        return sorted({partition_for(group_id, _SHARED_SHARDS) for group_id in groups})

    def _keep_only(self, faults: frozenset[str]) -> None:
        if "network" not in faults:
            self.drop_probability = self.duplicate_probability = self.delay_probability = 0.0
        if "disk" not in faults:
            self.disk_error_probability = 0.0
        names = {"crash": "broker", "network": "partition"}
        kept = {names.get(fault, fault) for fault in faults}
        self.every_ms = {kind: every if kind in kept else 0 for kind, every in self.every_ms.items()}

    def broker_config(self, node_id: int = 1) -> BrokerConfig:
        """Returns a configuration with limits far below Kafka's defaults, so that timeouts happen in a short run."""
        more = {"authorizer.class.name": _AUTHORIZER, "super.users": SUPER_USER} if self.has_acls else {}
        if self.has_client_assignors:
            more["kcoord.client.assignors.enable"] = "true"
            more["kcoord.client.assignor.fallback"] = self.fallback
            more["kcoord.client.assignor.metadata.max.bytes"] = str(MOST_ASSIGNOR_BYTES)
            more["kcoord.client.assignor.group.metadata.max.bytes"] = str(MOST_GROUP_ASSIGNOR_BYTES)
        if self.assignor:
            name = KNOWN_CONSUMER_ASSIGNORS.get(self.assignor)
            further = [built_in for built_in in ("uniform", "range") if built_in != name]
            more["group.consumer.assignors"] = ",".join([self.assignor, *further])
        return BrokerConfig.from_properties(
            {
                **more,
                "node.id": str(node_id),
                "log.dirs": "data",
                "listeners": "PLAINTEXT://broker:9092",
                "auto.create.topics.enable": "false",
                "offsets.topic.num.partitions": str(self.group_partitions),
                "offsets.topic.segment.bytes": str(self.segment_bytes),
                "transaction.state.log.num.partitions": str(self.transaction_shards),
                "transaction.state.log.segment.bytes": str(self.segment_bytes),
                "log.cleaner.delete.retention.ms": str(TOMBSTONES_KEPT_MS),
                "kcoord.fast.paths.enable": str(self.fast_paths).lower(),
                "group.consumer.session.timeout.ms": str(self.session_timeout_ms),
                "group.consumer.min.session.timeout.ms": "5000",
                "group.consumer.heartbeat.interval.ms": str(self.heartbeat_interval_ms),
                "group.consumer.min.heartbeat.interval.ms": "100",
                "group.consumer.assignment.interval.ms": str(self.assignment_interval_ms),
                "group.consumer.migration.policy": self.migration_policy,
                "kcoord.max.id.bytes": "1000",
                "kcoord.partition.max.groups": str(self.most_groups),
                "transaction.partition.verification.enable": str(self.verification).lower(),
                "group.consumer.max.size": str(self.most_members),
                "group.max.size": str(self.most_members),
                "group.initial.rebalance.delay.ms": "500",
                "kcoord.assignor.inline.ms": str(self.inline_ms),
                "offsets.retention.minutes": "1",
                "offsets.retention.check.interval.ms": str(self.retention_check_ms),
                "kcoord.offsets.expiration.policy": self.expiration_policy,
                "transactional.id.expiration.ms": "20000",
                "transaction.remove.expired.transaction.cleanup.interval.ms": "5000",
            }
        )

    def __str__(self) -> str:
        return " ".join(f"{field.name}={getattr(self, field.name)}" for field in fields(self))


def _as_drawn(options: Options) -> None:
    """Changes nothing."""


def _migration(options: Options) -> None:
    options.protocols = ("mixed", "mixed")
    options.every_ms = {**options.every_ms, "member": 2_000}


def _rollback(options: Options) -> None:
    """Static members change their protocol, processes crash often, and only every other process allows downgrades."""
    _migration(options)
    options.static_share, options.disk_delay_ms = 1.0, 200
    options.migration_policies = ("upgrade", "bidirectional")
    options.every_ms = {**options.every_ms, "broker": 3_000, "member": 1_000}


def _transactions(options: Options) -> None:
    options.producers = 3


def _compaction(options: Options) -> None:
    options.segment_bytes, options.clean_every_ms, options.snapshot_bytes = 2_048, 700, 8_000
    options.every_ms = {**options.every_ms, "broker": 6_000}


def _storm(options: Options) -> None:
    options.drop_probability, options.duplicate_probability, options.delay_probability = 0.05, 0.1, 0.02
    options.every_ms = {**options.every_ms, "broker": 6_000, "pause": 10_000, "shard": 5_000, "partition": 5_000}


def _expiration(options: Options) -> None:
    options.every_ms = {**options.every_ms, "lull": 10_000}


def _topics(options: Options) -> None:
    """Topics are created and grow while groups are deleted and created."""
    options.protocols, options.clean_every_ms, options.snapshot_bytes = ("consumer", "consumer"), 0, 0
    options.every_ms = {**options.every_ms, "topic": 500, "admin": 500, "member": 3_000, "broker": 0}


def _records(options: Options) -> None:
    """Clients write and read records all the time, processes and machines crash, and the disk fails."""
    options.record_producers, options.producers, options.disk_error_probability = 3, 2, 0.01
    options.every_ms = {**options.every_ms, "broker": 6_000}


def _controller(options: Options) -> None:
    """The controller crashes again and again while topics and configs change all the time."""
    options.every_ms = {**options.every_ms, "controller": 5_000, "topic": 800, "config": 2_000}


def _security(options: Options) -> None:
    """ACLs and quotas change all the time while fast paths answer the requests of guests."""
    options.has_acls, options.fast_paths, options.network_delay_ms = True, True, 50
    options.every_ms = {**options.every_ms, "acl": 300, "quota": 2_000, "controller": 20_000, "rude": 0}


def _configs(options: Options) -> None:
    """Configs of groups change all the time while the fast path answers heartbeats."""
    options.protocols, options.heartbeat_interval_ms, options.fast_paths = ("consumer", "consumer"), 500, True
    options.every_ms = {**options.every_ms, "config": 1_000}


def _client_assignors(options: Options) -> None:
    """Members compute target assignments while members and topics come and go."""
    options.has_client_assignors, options.heartbeat_interval_ms, options.assignment_interval_ms = True, 500, 0
    if options.protocols[0] == "classic":
        options.protocols = ("consumer", "mixed")
    options.every_ms = {**options.every_ms, "member": 3_000, "rude": 0}


def _corners(options: Options) -> None:
    """No faults, and limits that the scripts of `corners` rely on."""
    options._keep_only(frozenset())
    options.protocols, options.shards, options.producers, options.record_producers = ("consumer",), 3, 0, 0
    options.network_delay_ms, options.disk_delay_ms, options.hop_ms, options.most_groups = 2, 2, 200, 100
    options.migration_policy, options.verification = "bidirectional", False
    options.has_foreign_shards, options.turn_ms, options.fast_paths, options.has_acls = False, 0, True, False
    options.has_client_assignors, options.conducts = True, "any"


UPSTREAM: Final = "upstream"
"""The scenario with instances in front of an upstream, which has a world of its own."""
SCENARIOS: Final[Mapping[str, Callable[[Options], None]]] = {
    "": _as_drawn,
    "migration": _migration,
    "rollback": _rollback,
    "transactions": _transactions,
    "compaction": _compaction,
    "expiration": _expiration,
    "storm": _storm,
    "topics": _topics,
    "configs": _configs,
    "controller": _controller,
    "records": _records,
    "security": _security,
    "client-assignors": _client_assignors,
    "corners": _corners,
    UPSTREAM: _as_drawn,
}
