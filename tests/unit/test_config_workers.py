# SPDX-License-Identifier: Apache-2.0
"""The number of workers of a configuration, and the settings of each worker."""

from __future__ import annotations

import pytest

from kcoord.config import BrokerConfig, ConfigError
from kcoord.config.workers import worker_count, worker_properties


def config(**settings: str) -> BrokerConfig:
    """Returns a configuration; underscores in the names stand for dots."""
    return BrokerConfig.from_properties({key.replace("_", "."): value for key, value in settings.items()})


def worker(base: BrokerConfig, number: int) -> BrokerConfig:
    return BrokerConfig.from_properties(worker_properties(base, number))


def test_one_worker_is_the_default() -> None:
    assert worker_count(config()) == 1


def test_ports_and_ids_follow_the_configured_ones() -> None:
    base = config(
        node_id="4",
        listeners="PLAINTEXT://127.0.0.1:9092,OTHER://[::1]:9192",
        listener_security_protocol_map="PLAINTEXT:PLAINTEXT,OTHER:PLAINTEXT",
        advertised_listeners="PLAINTEXT://public:19092",
        group_coordinator_threads="3",
    )
    assert worker_count(base) == 3
    last = worker(base, 2)
    assert last.node_id == 6
    assert [str(listener) for listener in last.open_listeners] == ["PLAINTEXT://127.0.0.1:9094", "OTHER://[::1]:9194"]
    assert [str(listener) for listener in last.client_advertised_listeners] == ["PLAINTEXT://public:19094"]
    assert worker_count(last) == 1


def test_given_ports_racks_and_the_older_name_of_the_id() -> None:
    base = config(
        broker_id="2",
        listeners="PLAINTEXT://:9092",
        advertised_listeners="PLAINTEXT://public:1000",
        kcoord_worker_ports="9092,7000",
        kcoord_worker_racks="a,b",
    )
    assert worker_count(base) == 2
    second = worker(base, 1)
    assert (second.node_id, second.broker_rack) == (3, "b")
    assert [listener.port for listener in second.open_listeners] == [7000]
    assert [listener.port for listener in second.client_advertised_listeners] == [1001]
    assert [listener.port for listener in worker(config(kcoord_worker_ports="0,0"), 1).open_listeners] == [0]


def test_a_key_of_one_worker_takes_precedence() -> None:
    base = config(
        group_coordinator_threads="2",
        max_connections="10",
        kcoord_worker_1_max_connections="20",
        kcoord_worker_0_broker_rack="a",
        advertised_listeners="PLAINTEXT://public:1000",
        kcoord_worker_1_advertised_listeners="PLAINTEXT://other:5",
    )
    first, second = worker(base, 0), worker(base, 1)
    assert (first.max_connections, second.max_connections) == (10, 20)
    assert (first.broker_rack, second.broker_rack) == ("a", None)
    assert [str(listener) for listener in first.client_advertised_listeners] == ["PLAINTEXT://public:1000"]
    assert [str(listener) for listener in second.client_advertised_listeners] == ["PLAINTEXT://other:5"]
    assert (base.unknown, first.unknown, second.of_workers) == ([], [], {})


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kcoord_worker_1_max_connections": "5"}, "Invalid key for worker 1 "),
        (
            {"group_coordinator_threads": "2", "kcoord_worker_1_node_id": "5"},
            "node.id cannot be set for worker 1: all workers must have the same value",
        ),
        (
            {"listeners": "PLAINTEXT://:0", "group_coordinator_threads": "257"},
            r"Invalid value 257 for configuration group\.coordinator\.threads: Value must be no more than 256",
        ),
        ({"kcoord_worker_0_nonsense": "5"}, "nonsense cannot be set for worker 0: the key does not exist"),
        ({"kcoord_worker_0_max_connections": "many"}, "Invalid value many for configuration max.connections"),
        ({"kcoord_worker_ports": "9092,x"}, "Invalid value x for configuration kcoord.worker.ports"),
        ({"kcoord_worker_ports": "9092,65536"}, "a port is a number from 0 to 65535"),
        ({"kcoord_worker_ports": "9092,9092"}, "each listener must have a different port"),
        (
            {"kcoord_worker_ports": "1,2", "group_coordinator_threads": "3"},
            "2 ports, but group.coordinator.threads is 3",
        ),
        (
            {"kcoord_worker_racks": "a", "group_coordinator_threads": "2"},
            "there are 2 workers, so 2 racks are required",
        ),
        (
            {"kcoord_metrics_port": "65534", "group_coordinator_threads": "3"},
            r"^worker 2: Invalid value 65536 for configuration kcoord\.metrics\.port",
        ),
        (
            {"node_id": "2147483647", "group_coordinator_threads": "2"},
            r"^worker 1: Invalid value 2147483648 for configuration node\.id",
        ),
        (
            {"advertised_listeners": "PLAINTEXT://x:65535", "group_coordinator_threads": "2"},
            r"^worker 1: Invalid value PLAINTEXT://x:65536 for configuration advertised\.listeners",
        ),
        (
            {"listeners": "PLAINTEXT://:65535", "group_coordinator_threads": "2"},
            "a worker would need port 65536 for PLAINTEXT",
        ),
    ],
)
def test_settings_that_do_not_fit_together(settings: dict[str, str], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        config(**settings)
