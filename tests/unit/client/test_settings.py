# SPDX-License-Identifier: Apache-2.0
"""Settings: defaults, checks, properties files, reset policies and durations, addresses."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kcoord.client import AdminClient, AdminConfig, ConfigException, Consumer, ConsumerConfig, Producer, ProducerConfig
from kcoord.client.backoff import Backoff
from kcoord.client.config import BATCH_SIZE_LIMIT, AdminOptions, ConsumerOptions, ProducerOptions, parse_addresses
from kcoord.client.reset_policy import EARLIEST, LATEST, NONE, parse_duration_ms, parse_reset_policy

SERVER = "localhost:9092"


@pytest.mark.parametrize(
    ("config", "options"),
    [(AdminConfig, AdminOptions), (ProducerConfig, ProducerOptions), (ConsumerConfig, ConsumerOptions)],
)
def test_keyword_arguments_are_the_settings(config: type, options: type) -> None:
    assert options.__annotations__.keys() == {field.name for field in fields(config)}


COMMON_DEFAULTS = {
    "bootstrap_servers": SERVER,
    "client_id": "kcoord-client",
    "client_software_name": "kcoord",
    "kip_1327_revision": "creation-time",
    "request_timeout_ms": 30_000,
    "default_api_timeout_ms": 60_000,
    "retry_backoff_ms": 100,
    "retry_backoff_max_ms": 1_000,
    "reconnect_backoff_ms": 50,
    "reconnect_backoff_max_ms": 1_000,
    "socket_connection_setup_timeout_ms": 10_000,
    "metadata_max_age_ms": 300_000,
    "receive_message_max_bytes": 268_435_456,
    "security": None,
}
PRODUCER_DEFAULTS = {
    "acks": "all",
    "enable_idempotence": True,
    "compression_type": "none",
    "linger_ms": 5,
    "batch_size": 16_384,
    "buffer_memory": 33_554_432,
    "max_block_ms": 60_000,
    "max_request_size": 1_048_576,
    "delivery_timeout_ms": 120_000,
    "partitioner_ignore_keys": False,
    "transactional_id": None,
    "transaction_timeout_ms": 60_000,
}
CONSUMER_DEFAULTS = {
    "group_id": None,
    "group_protocol": "consumer",
    "group_instance_id": None,
    "group_remote_assignor": None,
    "group_local_assignors": (),
    "client_rack": "",
    "auto_offset_reset": "latest",
    "auto_offset_reset_new_partitions": None,
    "enable_auto_commit": True,
    "auto_commit_interval_ms": 5_000,
    "isolation_level": "read_uncommitted",
    "check_crcs": True,
    "fetch_min_bytes": 1,
    "fetch_max_bytes": 52_428_800,
    "fetch_max_wait_ms": 500,
    "max_partition_fetch_bytes": 1_048_576,
    "max_poll_records": 500,
    "max_poll_interval_ms": 300_000,
    "allow_auto_create_topics": True,
}


@pytest.mark.parametrize(
    ("config", "defaults"),
    [
        (AdminConfig, COMMON_DEFAULTS),
        (ProducerConfig, COMMON_DEFAULTS | PRODUCER_DEFAULTS),
        (ConsumerConfig, COMMON_DEFAULTS | CONSUMER_DEFAULTS),
    ],
)
def test_the_defaults_of_the_settings(config: Any, defaults: dict[str, object]) -> None:
    made = config(bootstrap_servers=SERVER)
    assert {field.name: getattr(made, field.name) for field in fields(config)} == defaults


@pytest.mark.parametrize(
    ("config", "lowest"),
    [
        (
            AdminConfig,
            {
                "retry_backoff_ms": 0,
                "retry_backoff_max_ms": 0,
                "reconnect_backoff_ms": 0,
                "reconnect_backoff_max_ms": 0,
                "metadata_max_age_ms": 0,
                "request_timeout_ms": 1,
                "default_api_timeout_ms": 1,
                "socket_connection_setup_timeout_ms": 1,
                "receive_message_max_bytes": 1,
            },
        ),
        (
            ProducerConfig,
            {
                "retry_backoff_ms": 0,
                "linger_ms": 0,
                "batch_size": 0,
                "max_block_ms": 0,
                "max_request_size": 0,
                "buffer_memory": 1,
                "transaction_timeout_ms": 1,
            },
        ),
        (
            ConsumerConfig,
            {
                "retry_backoff_ms": 0,
                "auto_commit_interval_ms": 0,
                "fetch_min_bytes": 0,
                "fetch_max_bytes": 0,
                "fetch_max_wait_ms": 0,
                "max_partition_fetch_bytes": 0,
                "max_poll_records": 1,
                "max_poll_interval_ms": 1,
            },
        ),
    ],
)
def test_numbers_have_lower_bounds(config: Any, lowest: dict[str, int]) -> None:
    for name, value in lowest.items():
        assert getattr(config(bootstrap_servers=SERVER, **{name: value}), name) == value
        for bad in (value - 1, True, 1.5):
            with pytest.raises(ConfigException, match=f"{name}: "):
                config(bootstrap_servers=SERVER, **{name: bad})


@pytest.mark.parametrize("config", [ProducerConfig, ConsumerConfig])
def test_numbers_fit_in_kafkas_types(config: Any) -> None:
    """No request can have a greater number."""
    longs = {"buffer_memory", "metadata_max_age_ms", "max_block_ms", "retry_backoff_ms", "retry_backoff_max_ms"}
    longs |= {"reconnect_backoff_ms", "reconnect_backoff_max_ms", "socket_connection_setup_timeout_ms"}
    for field in fields(config):
        if field.type != "int" or field.name in ("batch_size", "linger_ms"):
            continue
        most = (1 << 63 if field.name in longs else 1 << 31) - 1
        settings: dict[str, Any] = {"bootstrap_servers": SERVER}
        if config is ProducerConfig:
            settings |= {"delivery_timeout_ms": (1 << 31) - 1, "linger_ms": 0}
        assert getattr(config(**settings | {field.name: most}), field.name) == most
        with pytest.raises(ConfigException, match=f"{field.name}: {most + 1} is not a whole number from . to {most}"):
            config(**settings | {field.name: most + 1})


@pytest.mark.parametrize(
    ("config", "name", "allowed"),
    [
        (AdminConfig, "kip_1327_revision", ["creation-time", "new-partitions"]),
        (ProducerConfig, "acks", ["all", -1]),
        (ProducerConfig, "compression_type", ["none", "gzip", "snappy", "lz4", "zstd"]),
        (ConsumerConfig, "isolation_level", ["read_uncommitted", "read_committed"]),
        (ConsumerConfig, "group_protocol", ["consumer"]),
    ],
)
def test_settings_with_a_list_of_values(config: Any, name: str, allowed: list[object]) -> None:
    for value in allowed:
        assert getattr(config(bootstrap_servers=SERVER, **{name: value}), name) == value
    with pytest.raises(ConfigException, match=f"{name}: 'other' is not one of"):
        config(bootstrap_servers=SERVER, **{name: "other"})


class TestProducerLimits:
    def test_the_largest_batch_size(self) -> None:
        assert ProducerConfig(bootstrap_servers=SERVER, batch_size=BATCH_SIZE_LIMIT).batch_size == BATCH_SIZE_LIMIT
        with pytest.raises(ConfigException, match="batch_size"):
            ProducerConfig(bootstrap_servers=SERVER, batch_size=BATCH_SIZE_LIMIT + 1)

    def test_the_delivery_timeout_covers_linger_and_request_timeout(self) -> None:
        times: Any = {"linger_ms": 10, "request_timeout_ms": 100}
        assert ProducerConfig(bootstrap_servers=SERVER, delivery_timeout_ms=110, **times).delivery_timeout_ms == 110
        with pytest.raises(ConfigException, match="delivery_timeout_ms"):
            ProducerConfig(bootstrap_servers=SERVER, delivery_timeout_ms=109, **times)

    @pytest.mark.parametrize(("acks", "required"), [("all", -1), (-1, -1), (1, 1), (0, 0)])
    def test_acks_without_idempotence(self, acks: Any, required: int) -> None:
        config = ProducerConfig(bootstrap_servers=SERVER, acks=acks, enable_idempotence=False)
        assert config.required_acks == required

    def test_a_transactional_id_requires_idempotence_and_is_not_empty(self) -> None:
        assert ProducerConfig(bootstrap_servers=SERVER, transactional_id="t").transactional_id == "t"
        with pytest.raises(ConfigException, match="enable_idempotence"):
            ProducerConfig(bootstrap_servers=SERVER, transactional_id="t", enable_idempotence=False)
        with pytest.raises(ConfigException, match="transactional_id"):
            ProducerConfig(bootstrap_servers=SERVER, transactional_id="")


class TestConsumerSettings:
    def test_new_partitions_policy(self) -> None:
        config = ConsumerConfig(bootstrap_servers=SERVER, auto_offset_reset_new_partitions="earliest")
        assert (config.reset_policy, config.new_partitions_policy) == (LATEST, EARLIEST)
        assert ConsumerConfig(bootstrap_servers=SERVER).new_partitions_policy is None

    def test_the_classic_protocol_has_no_policy_for_new_partitions(self) -> None:
        with pytest.raises(ConfigException, match="auto_offset_reset_new_partitions"):
            Consumer(
                bootstrap_servers=SERVER,
                group_id="g",
                group_protocol="classic",
                auto_offset_reset_new_partitions="earliest",
            )

    def test_the_classic_protocol_is_rejected(self) -> None:
        with pytest.raises(ConfigException, match="group_protocol"):
            Consumer(bootstrap_servers=SERVER, group_id="g", group_protocol="classic")

    @pytest.mark.parametrize("text", ["none", "", "early", "by_duration:", "by_duration:5s", "by_duration:-PT1S"])
    def test_invalid_policies_for_new_partitions(self, text: str) -> None:
        with pytest.raises(ConfigException, match="auto_offset_reset_new_partitions"):
            ConsumerConfig(bootstrap_servers=SERVER, auto_offset_reset_new_partitions=text)

    @pytest.mark.parametrize(
        ("name", "value"),
        [
            ("group_id", " "),
            ("auto_offset_reset", "sometimes"),
            ("isolation_level", "serializable"),
            ("max_poll_records", 0),
            ("fetch_max_wait_ms", -1),
            ("request_timeout_ms", "soon"),
            ("bootstrap_servers", ""),
            ("bootstrap_servers", "nowhere"),
            ("client_id", "é" * 16_384),
            ("client_id", "\ud800"),
        ],
    )
    def test_errors_name_the_setting(self, name: str, value: object) -> None:
        with pytest.raises(ConfigException, match=name):
            Consumer(**({"bootstrap_servers": SERVER} | {name: value}))  # type: ignore[arg-type]

    def test_unknown_setting(self) -> None:
        with pytest.raises(ConfigException, match="fetch_size"):
            Consumer(bootstrap_servers=SERVER, fetch_size=1)  # type: ignore[call-arg]

    def test_a_config_with_keyword_arguments_is_rejected(self) -> None:
        with pytest.raises(ConfigException):
            AdminClient(AdminConfig(bootstrap_servers=SERVER), client_id="x")


class TestProducerSettings:
    @pytest.mark.parametrize(
        ("options", "name"),
        [
            ({"acks": 1}, "acks"),
            ({"acks": 2}, "acks"),
            ({"transactional_id": "t", "enable_idempotence": False}, "enable_idempotence"),
            ({"transactional_id": ""}, "transactional_id"),
            ({"delivery_timeout_ms": 1}, "delivery_timeout_ms"),
            ({"compression_type": "rar"}, "compression_type"),
            ({"batch_size": 1 << 31}, "batch_size"),
        ],
    )
    def test_invalid_combinations(self, options: dict[str, object], name: str) -> None:
        with pytest.raises(ConfigException, match=name):
            Producer(bootstrap_servers=SERVER, **options)  # type: ignore[arg-type]

    def test_acks(self) -> None:
        assert ProducerConfig(bootstrap_servers=SERVER).required_acks == -1
        assert ProducerConfig(bootstrap_servers=SERVER, acks=0, enable_idempotence=False).required_acks == 0


class TestProperties:
    def test_kafka_spelling(self) -> None:
        config = ConsumerConfig.from_properties(
            {
                "bootstrap.servers": "a:1,b:2",
                "group.id": "12",
                "max.poll.records": "7",
                "enable.auto.commit": "False",
                "auto.offset.reset.new.partitions": "by_duration:P1D",
            }
        )
        assert config.bootstrap_addresses == [("a", 1), ("b", 2)]
        assert (config.group_id, config.max_poll_records, config.enable_auto_commit) == ("12", 7, False)
        assert str(config.new_partitions_policy) == "by_duration:86400000ms"

    def test_values_are_read_as_by_kafkas_clients(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Space around them does not count, except in passwords, and group.protocol may be in upper case."""
        secured: list[dict[str, str]] = []
        monkeypatch.setattr("kcoord.client.kafka_properties.security_of", secured.append)
        texts = {"max.poll.records": " 7 ", "group.protocol": "CONSUMER ", "group.id": "g\t"}
        texts |= {"security.protocol": "SSL ", "ssl.key.password": " pw "}
        config = ConsumerConfig.from_properties({"bootstrap.servers": SERVER, **texts})
        assert (config.max_poll_records, config.group_protocol, config.group_id) == (7, "consumer", "g")
        assert (secured[0]["security.protocol"], secured[0]["ssl.key.password"]) == ("SSL", " pw ")

    def test_acks_as_word_and_number(self) -> None:
        for text, expected in (("all", -1), ("-1", -1)):
            assert ProducerConfig.from_properties({"bootstrap.servers": SERVER, "acks": text}).required_acks == expected

    @pytest.mark.parametrize(
        ("key", "text"),
        [
            ("max.poll.records", "x"),
            ("max.poll.records", "+-5"),
            ("max.poll.records", "9" * 5000),
            ("max.poll.records", "0"),
            ("check.crcs", "yes"),
            ("security.protocol", "ODD"),
            ("bootstrap.servers", "nowhere"),
            ("auto.offset.reset", "max_poll_records"),
        ],
    )
    def test_errors_name_the_property(self, key: str, text: str) -> None:
        with pytest.raises(ConfigException, match=f"^{re.escape(key)}: '?{re.escape(text)}'? "):
            ConsumerConfig.from_properties({"bootstrap.servers": SERVER, key: text})

    def test_errors_name_other_properties_too(self) -> None:
        with pytest.raises(ConfigException, match=r"^delivery\.timeout\.ms: .* linger\.ms \+ request\.timeout\.ms "):
            ProducerConfig.from_properties({"bootstrap.servers": SERVER, "delivery.timeout.ms": "1"})
        with pytest.raises(ConfigException, match="acks: 'many' is"):
            ProducerConfig.from_properties({"bootstrap.servers": SERVER, "acks": "many"})

    def test_each_key_of_kafkas_clients_is_used_or_warned_of(self) -> None:
        """The keys and values are those of files for Kafka's own tools."""
        warnings: list[str] = []
        config = ConsumerConfig.from_properties(
            {
                "bootstrap.servers": SERVER,
                "security.protocol": "plaintext",
                "group.id": "g",
                "group.protocol": "classic",
                "session.timeout.ms": "45000",
                "partition.assignment.strategy": "org.apache.kafka.clients.consumer.RangeAssignor",
                "key.deserializer": "org.apache.kafka.common.serialization.ByteArrayDeserializer",
                "value.deserializer": "org.apache.kafka.common.serialization.StringDeserializer",
                "sasl.mechanism": "PLAIN",
                "send.buffer.bytes": "1",
                "no.such.key": "1",
                "fetch.min.bytes": "7",
            },
            warnings.append,
        )
        assert (config.group_id, config.group_protocol, config.fetch_min_bytes) == ("g", "consumer", 7)
        assert [warning.split(" has no effect here")[0] for warning in warnings] == [
            "group.protocol=classic",
            "no.such.key",
            "partition.assignment.strategy",
            "sasl.mechanism",
            "send.buffer.bytes",
            "session.timeout.ms",
            "value.deserializer",
        ]
        assert "consumer.session.timeout.ms" in warnings[5]

    def test_acks_in_a_file_disable_idempotence_unless_it_is_set(self) -> None:
        properties = {"bootstrap.servers": SERVER, "acks": "1"}
        assert not ProducerConfig.from_properties(properties).enable_idempotence
        with pytest.raises(ConfigException, match="acks: must be all"):
            ProducerConfig.from_properties({**properties, "enable.idempotence": "true"})
        assert ProducerConfig.from_properties({**properties, "acks": "all"}).enable_idempotence
        assert ProducerConfig.from_properties({"bootstrap.servers": SERVER}).enable_idempotence

    def test_classic_is_special_for_group_protocol_only(self) -> None:
        notes: list[str] = []
        properties = {"bootstrap.servers": SERVER, "group.protocol": "Classic", "client.id": "classic", "x": "classic"}
        config = ConsumerConfig.from_properties(properties, notes.append)
        assert config.client_id == "classic"
        assert len(notes) == 2 and notes[0].startswith("group.protocol=classic has no effect")
        assert notes[1] == "x has no effect here"
        ConsumerConfig.from_properties({**properties, "group.protocol": "consumer"}, notes.append)
        assert notes[2:] == ["x has no effect here"]

    def test_warnings_are_logged_unless_the_caller_handles_them(self, caplog: pytest.LogCaptureFixture) -> None:
        AdminConfig.from_properties({"bootstrap.servers": SERVER, "retries": "3"})
        (record,) = caplog.records
        assert record.levelname == "WARNING"
        assert record.getMessage().startswith("retries has no effect here: requests are repeated until")


def test_addresses() -> None:
    assert parse_addresses(" a:1 , [::1]:2,") == [("a", 1), ("::1", 2)]
    assert parse_addresses(["h:9092"]) == [("h", 9092)]
    assert parse_addresses("PLAINTEXT://h:1,SASL_SSL://[::1]:2") == [("h", 1), ("::1", 2)]
    assert parse_addresses("h:65535,h:1") == [("h", 65535), ("h", 1)]
    for text in (":1", "PLAINTEXT://:1", "h:", "h:0", "h:65536", "h:x"):
        with pytest.raises(ConfigException):
            parse_addresses(text)


class TestDurations:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("PT5S", 5_000),
            ("PT1H", 3_600_000),
            ("P1D", 86_400_000),
            ("P2DT3H4M5.678S", 183_845_678),
            ("pt0.5s", 500),
            ("PT-0.5S", -500),
            ("-PT1M", -60_000),
            ("PT+3M", 180_000),
            ("PT1.123456789S", 1_123),
            ("PT0S", 0),
        ],
    )
    def test_java_durations(self, text: str, expected: int) -> None:
        assert parse_duration_ms(text) == expected

    @pytest.mark.parametrize(
        "text", ["", "P", "PT", "P1DT", "5s", "1H", "P1H", "PT1D", "P1M", "PT1.5M", "PT1S2M", "P 1D"]
    )
    def test_invalid_durations(self, text: str) -> None:
        assert parse_duration_ms(text) is None

    @given(st.integers(0, 500), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59), st.integers(0, 999))
    def test_parts_of_a_duration_add_up(self, days: int, hours: int, minutes: int, seconds: int, millis: int) -> None:
        text = f"by_duration:P{days}DT{hours}H{minutes}M{seconds}.{millis:03}S"
        expected = (((days * 24 + hours) * 60 + minutes) * 60 + seconds) * 1000 + millis
        assert parse_reset_policy("x", text).duration_ms == expected


def test_reset_policies() -> None:
    assert parse_reset_policy("x", "LATEST") is LATEST
    assert parse_reset_policy("x", "none") is NONE
    assert LATEST.timestamp(10) == -1
    assert EARLIEST.timestamp(10) == -2
    assert parse_reset_policy("x", "by_duration:PT1S").timestamp(500) == 0
    assert parse_reset_policy("x", "by_duration:PT0S").timestamp(500) == 500
    with pytest.raises(ConfigException, match="needs a duration that is not negative"):
        parse_reset_policy("x", "by_duration:-PT0.001S")
    assert parse_reset_policy("x", "to_start_time").timestamp(500, 77) == 77


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auto_offset_reset": "to_start_time"}, "needs a group_id"),
        (
            {"auto_offset_reset": "to_start_time", "group_id": "g", "kip_1327_revision": "new-partitions"},
            "new-partitions does not have",
        ),
        ({"auto_offset_reset_new_partitions": "to_start_time", "group_id": "g"}, "for auto_offset_reset only"),
        ({"auto_offset_reset_new_partitions": "none", "group_id": "g"}, "'none' is not one of latest, earliest"),
        (
            {"kip_1327_revision": "newest"},
            "kip_1327_revision: 'newest' is not one of off, creation-time, new-partitions",
        ),
        ({"client_software_name": "-a"}, "client_software_name: '-a' is not made of letters"),
        ({"client_software_name": ""}, "client_software_name: '' is not made of letters"),
    ],
)
def test_invalid_settings_of_kip_1327(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigException, match=message):
        ConsumerConfig(bootstrap_servers="a:1", **options)


@given(st.integers(0, 100), st.floats(0, 1, exclude_max=True))
def test_backoff_grows_within_its_limits(failures: int, random: float) -> None:
    backoff = Backoff(100, 1000)
    delay = backoff.delay_ms(failures, random)
    assert 0 <= delay <= 1200
    assert backoff.delay_ms(0, random) == 0
    assert backoff.delay_ms(1, 0.5) == 100
    assert backoff.delay_ms(3, 0.5) == 400
    if failures:
        assert delay >= 80
