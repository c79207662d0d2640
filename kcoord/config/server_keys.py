# SPDX-License-Identifier: Apache-2.0
"""Broker keys of the node, its listeners, connections, limits and topic defaults."""

from __future__ import annotations

from kcoord.config.key import (
    ConfigKey,
    ConfigType,
    Importance,
    Range,
    UpdateMode,
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
PER_BROKER = UpdateMode.PER_BROKER
CLUSTER_WIDE = UpdateMode.CLUSTER_WIDE

JMX_REPORTER = "org.apache.kafka.common.metrics.JmxReporter"
DEFAULT_PRINCIPAL_BUILDER = "org.apache.kafka.common.security.authenticator.DefaultKafkaPrincipalBuilder"

SERVER_KEYS: tuple[ConfigKey, ...] = (
    ConfigKey(
        "advertised.listeners",
        LIST,
        None,
        None,
        HIGH,
        "Addresses that clients are told to connect to; by default those of listeners.",
    ),
    ConfigKey(
        "authorizer.class.name",
        STRING,
        "",
        None,
        LOW,
        "Class name of the authorizer. Only empty is allowed, so that everybody may do everything; the start with any "
        "other value is refused.",
    ),
    ConfigKey(
        "auto.create.topics.enable",
        BOOLEAN,
        True,
        None,
        HIGH,
        "Create a topic when a client asks for the metadata of an unknown name and permits creation.",
    ),
    ConfigKey("broker.id", INT, -1, None, HIGH, "Older name of node.id."),
    ConfigKey("broker.rack", STRING, None, None, MEDIUM, "Rack of this broker, told to clients in Metadata."),
    ConfigKey(
        "connections.max.idle.ms",
        LONG,
        600000,
        None,
        MEDIUM,
        "A connection without requests for this long is closed, and one that takes nothing of its answers.",
    ),
    ConfigKey(
        "controller.listener.names",
        LIST,
        [],
        None,
        HIGH,
        "Names in listeners that belong to a controller; they are not opened, since the metadata log has one "
        "writer inside the broker.",
    ),
    ConfigKey(
        "default.replication.factor",
        INT,
        1,
        None,
        MEDIUM,
        "Replication factor of topics that do not ask for one, at most one for each worker; nominal, one copy is kept.",
    ),
    ConfigKey("delete.topic.enable", BOOLEAN, True, None, HIGH, "Whether topics can be deleted."),
    ConfigKey("fetch.max.bytes", INT, 57671680, at_least(1024), MEDIUM, "Largest answer to one Fetch request."),
    ConfigKey(
        "listener.security.protocol.map",
        STRING,
        "SASL_SSL:SASL_SSL,PLAINTEXT:PLAINTEXT,SSL:SSL,SASL_PLAINTEXT:SASL_PLAINTEXT",
        None,
        LOW,
        "Security protocol of every listener name.",
    ),
    ConfigKey(
        "listeners",
        LIST,
        ["PLAINTEXT://127.0.0.1:9092"],
        None,
        HIGH,
        "Addresses to listen on, as NAME://host:port; an empty host or 0.0.0.0 means all interfaces, port 0 a "
        "free port.",
    ),
    ConfigKey(
        "max.connection.creation.rate",
        INT,
        2000,
        at_least(0),
        MEDIUM,
        "Most new connections per second, on average over the quota windows; more have to wait for their turn. "
        "Kafka sets no limit by default.",
        update_mode=CLUSTER_WIDE,
    ),
    ConfigKey(
        "max.connections",
        INT,
        20000,
        at_least(0),
        MEDIUM,
        "Most open connections at a time. Kafka sets no limit by default.",
        update_mode=CLUSTER_WIDE,
    ),
    ConfigKey(
        "max.connections.per.ip",
        INT,
        10000,
        at_least(0),
        MEDIUM,
        "Most open connections from one address. Kafka sets no limit by default.",
        update_mode=CLUSTER_WIDE,
    ),
    ConfigKey(
        "max.connections.per.ip.overrides",
        STRING,
        "",
        None,
        MEDIUM,
        "Exceptions to max.connections.per.ip, as host:count separated by commas.",
        update_mode=CLUSTER_WIDE,
    ),
    ConfigKey(
        "max.incremental.fetch.session.cache.slots",
        INT,
        1000,
        at_least(0),
        MEDIUM,
        "Most incremental fetch sessions that are remembered.",
    ),
    ConfigKey(
        "max.request.partition.size.limit",
        INT,
        2000,
        at_least(1),
        MEDIUM,
        "Most partitions in one DescribeTopicPartitions answer.",
    ),
    ConfigKey("node.id", INT, 1, at_least(0), HIGH, "Number of this node."),
    ConfigKey("num.partitions", INT, 1, at_least(1), MEDIUM, "Partitions of topics that do not ask for a number."),
    ConfigKey(
        "principal.builder.class",
        ConfigType.CLASS,
        DEFAULT_PRINCIPAL_BUILDER,
        None,
        MEDIUM,
        "Class that makes a principal of a connection. Only Kafka's own is allowed, whose principal of a client that "
        "does not authenticate is User:ANONYMOUS; the start with any other value is refused.",
        update_mode=PER_BROKER,
    ),
    ConfigKey(
        "metric.reporters",
        LIST,
        [JMX_REPORTER],
        None,
        LOW,
        "Classes that Kafka would tell its metrics. None is loaded; with any but the JMX reporter clients are offered "
        "to push their metrics (KIP-714), as if it took them.",
        update_mode=CLUSTER_WIDE,
    ),
    ConfigKey("quota.window.num", INT, 11, at_least(1), LOW, "Windows kept for quotas."),
    ConfigKey("quota.window.size.seconds", INT, 1, at_least(1), LOW, "Length of one quota window."),
    ConfigKey("socket.listen.backlog.size", INT, 50, at_least(1), MEDIUM, "Connections that may wait to be accepted."),
    ConfigKey(
        "socket.receive.buffer.bytes",
        INT,
        -1,
        Range(1, also=-1),
        HIGH,
        "Receive buffer of each connection; -1 leaves it to the system, which sizes it as a connection needs. Kafka's "
        "default is 102400.",
    ),
    ConfigKey("socket.request.max.bytes", INT, 104857600, at_least(1), HIGH, "Largest request."),
    ConfigKey(
        "socket.send.buffer.bytes",
        INT,
        -1,
        Range(1, also=-1),
        HIGH,
        "Send buffer of each connection; -1 leaves it to the system, which sizes it as a connection needs. Kafka's "
        "default is 102400.",
    ),
    ConfigKey(
        "telemetry.max.bytes", INT, 1048576, at_least(1), LOW, "Most bytes of metrics that a client may push at once."
    ),
    ConfigKey(
        "unstable.api.versions.enable",
        BOOLEAN,
        False,
        None,
        HIGH,
        "Also offer API versions that are not final.",
        internal=True,
    ),
)
