# SPDX-License-Identifier: Apache-2.0
"""The form of KIP-1327 for each client: `kcoord.kip1327.revisions`, entries of `software-name:form`.

Two revisions of the KIP give ConsumerGroupHeartbeat v2 different layouts, and a release of Apache Kafka could add a
third layout. Each connection therefore has the form that its client implements. The form is chosen by the software name
that the client sends in ApiVersions v3 and later (KIP-511).

Clients that follow Apache Kafka get `off`, since their heartbeat v2 would have Apache Kafka's layout. These are the
names in the key's default (keys.txt), and the place in which each client defines its name:

| name | defined in |
|---|---|
| dekaf | thomhurst/Dekaf#2314, which reads the later layout |
| apache-kafka-java | `AppInfoParser` and `ApiVersionsRequest.Builder` of Apache Kafka's clients, tools included |
| librdkafka | the default of its `client.software.name`, also for bindings that set no name |
| confluent-kafka-python | the binding's C module, 2.16 |
| confluent-kafka-go | `ConfigMap.convert` |
| confluent-kafka-dotnet | the initial configuration of each client |
| confluent-kafka-javascript | lib/client.js |
| karafka, kafka-ruby, php-rdkafka-ffi | settings that they give to librdkafka |
| kgo | twmb/franz-go, pkg/kgo/config.go |
| sarama | IBM/sarama, api_versions_request.go |
| kafka-python | kafka/net/connection.py, 3.0 |
| kafkajs, aiokafka | nowhere yet: they send ApiVersions v0 to v2, without a name. Listed for a later release |
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Final

ANY_SOFTWARE: Final = "*"

REVISION_ENTRY: Final = (
    # KIP-511's rule for names: no client can have any other name.
    r"(\*|[a-zA-Z0-9]([a-zA-Z0-9.\-]*[a-zA-Z0-9])?)"
    r":(off|creation-time|new-partitions)"
)


class Kip1327Form(Enum):
    """The form of KIP-1327 on a connection."""

    OFF = "off"
    """Only the API versions of Apache Kafka."""
    CREATION_TIME = "creation-time"
    """Creation times in responses, as in the accepted KIP."""
    NEW_PARTITIONS = "new-partitions"
    """New partitions in the heartbeat response, listed by the coordinator, as in the later revision."""


def form_of(software_name: str, entries: Iterable[str]) -> Kip1327Form:
    """Returns the form of the first entry that matches the name, `off` if none does.

    An empty name matches only `*`.
    """
    for entry in entries:
        name, _, form = entry.rpartition(":")
        if name in (software_name, ANY_SOFTWARE):
            return Kip1327Form(form)
    return Kip1327Form.OFF
