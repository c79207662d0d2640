# SPDX-License-Identifier: Apache-2.0
"""Which form of KIP-1327 a client is served: `kcoord.kip1327.revisions`, entries of `software-name:form`.

Two revisions of the KIP give ConsumerGroupHeartbeat v2 different layouts, and a version of Apache Kafka could bring a
third. So each connection has the form that its client means, chosen by the name that the client gives in ApiVersions v3
and later (KIP-511).

Clients that follow Apache Kafka are served `off`: a heartbeat v2 of theirs would be Apache's. The names in the key's
default (keys.txt), and where each client says so:

| name | where |
|---|---|
| dekaf | thomhurst/Dekaf#2314, which reads the later layout |
| apache-kafka-java | `AppInfoParser` and `ApiVersionsRequest.Builder` of Apache Kafka's clients, tools included |
| librdkafka | the default of its `client.software.name`, and so of bindings that set no name |
| confluent-kafka-python | the binding's C module, 2.16 |
| confluent-kafka-go | `ConfigMap.convert` |
| confluent-kafka-dotnet | the configuration that each client begins with |
| confluent-kafka-javascript | lib/client.js |
| karafka, kafka-ruby, php-rdkafka-ffi | settings that they give to librdkafka |
| kgo | twmb/franz-go, pkg/kgo/config.go |
| sarama | IBM/sarama, api_versions_request.go |
| kafka-python | kafka/net/connection.py, 3.0 |
| kafkajs, aiokafka | none: today they send ApiVersions v0 to v2, without a name. Listed for a release that gives one |
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final

ANY_SOFTWARE: Final = "*"

REVISION_ENTRY: Final = (
    r"(\*|[a-zA-Z0-9]([a-zA-Z0-9.\-]*[a-zA-Z0-9])?)"  # KIP-511's rule for names; no client can have another one
    r":(off|creation-time|new-partitions)"
)


class Kip1327Form(Enum):
    """What a connection sees of KIP-1327."""

    OFF = "off"
    """Nothing: the versions of Apache Kafka."""
    CREATION_TIME = "creation-time"
    """Creation times in responses, as in the accepted text."""
    NEW_PARTITIONS = "new-partitions"
    """The coordinator lists new partitions in the heartbeat's response, as in the later revision."""


def form_of(software_name: str, entries: Iterable[str]) -> Kip1327Form:
    """The form of the first entry that matches the name; off if none does. An empty name matches `*` only."""
    for entry in entries:
        name, _, form = entry.rpartition(":")
        if name in (software_name, ANY_SOFTWARE):
            return Kip1327Form(form)
    return Kip1327Form.OFF
