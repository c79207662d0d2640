# SPDX-License-Identifier: Apache-2.0
"""The worker processes of a configuration.

There are `group.coordinator.threads` workers, or one for each of `kcoord.worker.ports`.

Each worker is a separate broker. Its id is `node.id` plus the number of the worker, and its listeners have their own
ports. Without `kcoord.worker.ports`, the port of worker N is the configured port plus N. This is always true for
advertised ports. `kcoord.worker.N.KEY` sets any key for one worker and takes precedence.
"""

from __future__ import annotations

from dataclasses import replace

from kcoord.config.broker_settings import BrokerSettings
from kcoord.config.key import ConfigError
from kcoord.config.listeners import Listener, check_bindable

LARGEST_PORT = 65535
PORTS_KEY = "kcoord.worker.ports"
THREADS_KEY = "group.coordinator.threads"
RACKS_KEY = "kcoord.worker.racks"
WORKER_PREFIX = "kcoord.worker."
"""The prefix of the keys that define the workers, and of the keys for a single worker."""


def worker_count(config: BrokerSettings) -> int:
    """Returns the number of workers; if it is 1, the broker is a single process."""
    return len(config.kcoord_worker_ports) or config.group_coordinator_threads


def worker_properties(config: BrokerSettings, number: int) -> dict[str, str]:
    """Returns the keys that were set, with the node id, listeners and rack of worker `number`, counted from 0."""
    properties = {
        key: text
        for key, text in config.explicit.items()
        if not key.startswith(WORKER_PREFIX) and key not in (THREADS_KEY, "broker.id")
    }
    properties["node.id"] = str(config.node_id + number)
    listeners = worker_listeners(config, number)
    properties["listeners"] = ",".join(map(str, listeners))
    if config.advertised_listeners:
        properties["advertised.listeners"] = ",".join(map(str, _advertised(config, number)))
    if config.kcoord_metrics_port > 0:
        properties["kcoord.metrics.port"] = str(config.kcoord_metrics_port + number)
    if config.kcoord_audit_log and worker_count(config) > 1:
        properties["kcoord.audit.log"] = f"{config.kcoord_audit_log}.broker-{config.node_id + number}"
    if config.kcoord_worker_racks:
        properties["broker.rack"] = config.kcoord_worker_racks[number]
    return properties | config.of_workers.get(number, {})


def worker_listeners(config: BrokerSettings, number: int) -> list[Listener]:
    """Returns the listeners that worker `number` binds. Port 0 stays 0: the system picks a port for each worker."""
    ports = [_moved(listener, number) for listener in config.open_listeners]
    if config.kcoord_worker_ports:
        ports[0] = int(config.kcoord_worker_ports[number])
    return [replace(listener, port=port) for listener, port in zip(config.open_listeners, ports, strict=True)]


def _moved(listener: Listener, number: int) -> int:
    return listener.port + number if listener.port else 0


def _advertised(config: BrokerSettings, number: int) -> list[Listener]:
    return [replace(listener, port=_moved(listener, number)) for listener in config.client_advertised_listeners]


def check_workers(config: BrokerSettings) -> None:
    """Raises ConfigError if the keys about workers do not fit together."""
    ports, threads = config.kcoord_worker_ports, config.group_coordinator_threads
    if ports and THREADS_KEY in config.explicit and threads != len(ports):
        raise ConfigError(
            f"Invalid value {','.join(ports)} for configuration {PORTS_KEY}: "
            f"there are {len(ports)} ports, but {THREADS_KEY} is {threads}"
        )
    count = worker_count(config)
    unknown = next((number for number in sorted(config.of_workers) if number >= count), None)
    if unknown is not None:
        raise ConfigError(
            f"Invalid key for worker {unknown} ({WORKER_PREFIX}{unknown}.*): workers are numbered from 0 to {count - 1}"
        )
    if config.kcoord_worker_racks and len(config.kcoord_worker_racks) != count:
        raise ConfigError(
            f"Invalid value {','.join(config.kcoord_worker_racks)} for configuration {RACKS_KEY}: "
            f"there are {count} workers, so {count} racks are required"
        )
    if count > 1 or ports:
        _check_ports(config, count)


def _check_ports(config: BrokerSettings, count: int) -> None:
    for text in config.kcoord_worker_ports:
        if not text.isascii() or not text.isdecimal() or int(text) > LARGEST_PORT:
            raise ConfigError(
                f"Invalid value {text} for configuration {PORTS_KEY}: a port is a number from 0 to {LARGEST_PORT}"
            )
    listeners = [listener for number in range(count) for listener in worker_listeners(config, number)]
    too_high = next((listener for listener in listeners if listener.port > LARGEST_PORT), None)
    if too_high is not None:
        raise ConfigError(
            f"Invalid value {count} for configuration {THREADS_KEY}: "
            f"a worker would need port {too_high.port} for {too_high.name}, and the largest port is {LARGEST_PORT}"
        )
    check_bindable(PORTS_KEY if config.kcoord_worker_ports else "listeners", listeners)
