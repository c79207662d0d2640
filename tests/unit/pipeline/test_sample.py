# SPDX-License-Identifier: Apache-2.0
"""Compares the decoder with the output of Kafka's own tools, on logs that Kafka wrote."""

from __future__ import annotations

from collections import Counter

import pytest

from kcoord.pipeline.kernels import DecoderName
from tests.support.offsets_sample import Row, described_offsets, differences, dumped_records, unpack_sample
from tests.unit.pipeline.support import table_rows


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> str:
    return unpack_sample(tmp_path_factory.mktemp("sample"))


@pytest.fixture(scope="module", params=["numpy", "numba"])
def decoder(request: pytest.FixtureRequest) -> DecoderName:
    name: DecoderName = request.param
    return name


@pytest.fixture(scope="module")
def records(sample: str, decoder: DecoderName) -> list[Row]:
    return table_rows(sample, decoder=decoder)


def test_every_record_is_what_kafka_dump_log_shows(records: list[Row]) -> None:
    dumped = list(dumped_records())
    assert len(dumped) == 13_773
    assert differences(records, dumped) == []


def test_the_sample_has_all_records_and_all_outcomes_of_transactions(records: list[Row]) -> None:
    assert len(records) == 24_368
    assert Counter(row["control_type"] for row in records) == {None: 23_959, "commit": 274, "abort": 135}
    assert Counter(row["transaction"] for row in records) == {None: 23_550, "committed": 548, "aborted": 270}
    assert [row for row in records if row["error"]] == []


def test_unknown_record_types_keep_their_bytes_and_their_group(records: list[Row]) -> None:
    share = [row for row in records if row["record_type"] in range(10, 16)]
    assert share and {row["group"] for row in share} == {"share-1"}
    assert {row["record_name"] for row in share} == {None}
    assert all(isinstance(row["key"], bytes) for row in share)


def test_current_offsets_are_what_kafka_consumer_groups_shows(sample: str, decoder: DecoderName) -> None:
    rows = table_rows(sample, "current_offsets", decoder=decoder)
    offsets = {(row["group"], row["topic"], row["partition"]): row["committed_offset"] for row in rows}
    assert len(rows) == 68
    assert offsets == described_offsets()


@pytest.mark.parametrize("size", ["4096", "20000"])
def test_cutting_segments_by_their_index_changes_nothing(sample: str, size: str) -> None:
    names = ["log_partition", "log_offset", "transaction", "effective_offset", "committed_offset", "group_end"]
    assert table_rows(sample, names=names, splitBytes=size) == table_rows(sample, names=names)


def test_small_tables_agree_with_the_records(sample: str) -> None:
    names = ["log_partition", "log_offset", "record_type", "is_tombstone"]
    records = table_rows(sample, names=names)
    members = [row for row in table_rows(sample, "members") if row["kind"] == "consumer"]
    assert len(members) == sum(row["record_type"] == 5 for row in records)
    epochs = table_rows(sample, "group_epochs")
    assert len(epochs) == sum(row["record_type"] in (2, 3, 6) for row in records)
    ends = [(row["log_partition"], row["log_offset"]) for row in epochs if row["group_end"]]
    tombstones = [row for row in records if row["record_type"] in (2, 3) and row["is_tombstone"]]
    assert ends == [(row["log_partition"], row["log_offset"]) for row in tombstones]
    classic = table_rows(sample, "classic_groups")
    named = [member["member_id"] for row in classic for member in row["members"] or []]  # type: ignore[attr-defined]
    assert named == [row["member_id"] for row in table_rows(sample, "members") if row["kind"] == "classic"]
    assert {row["regex"] for row in table_rows(sample, "regular_expressions")} != {None}
    assigned = [row for row in table_rows(sample, "assignments") if row["kind"] == "classic" and row["assigned"]]
    assert {row["group"] for row in assigned} == {"analytics-classic", "coop-classic", "etl-tx", "gone-soon"}
