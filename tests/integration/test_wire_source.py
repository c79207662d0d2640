# SPDX-License-Identifier: Apache-2.0
"""Logs read from brokers of Apache Kafka and of kcoord, compared with the same logs read from their folders."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest
from pyspark.sql.streaming.datasource import ReadMaxBytes

from kcoord.pipeline.log_stream import StreamOffset
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.planning import list_logs, log_ranges
from kcoord.pipeline.schemas import TABLES
from kcoord.pipeline.stream import KcoordStreamReader
from kcoord.runtime.serde import partition_for
from tests.support.coordinator_log import batches_of, random_log, stable_offset
from tests.support.followed_log import batch_rows
from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.support.kcoord_process import KcoordProcess
from tests.support.offsets_sample import LOG_PARTITIONS, unpack_sample
from tests.support.served_logs import TOPIC, serve_by_kafka, serve_by_kcoord
from tests.unit.pipeline.support import TOPIC as OFFSETS_TOPIC
from tests.unit.pipeline.support import LogWriter, source_rows

PARTITIONS = 24
"""The first are the sample of Kafka, the others random logs. Every second random log is cleaned."""

Served = KcoordProcess | KafkaBroker


def write_logs(folder: Path) -> None:
    unpack_sample(folder)
    for number in range(LOG_PARTITIONS, PARTITIONS):
        writer = LogWriter(folder, number, segment_bytes=2000)
        batches = batches_of(random_log(Random(number), 120))
        for batch in batches:
            writer.append(batch)
        if number % 2:
            writer.clean(stable_offset(batches))
        writer.close()
    for path in folder.iterdir():
        path.rename(folder / path.name.replace(OFFSETS_TOPIC, TOPIC))


@pytest.fixture(scope="module", params=["kcoord", "kafka"])
def broker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp(request.param)
    served: Served
    if request.param == "kcoord":
        served = serve_by_kcoord(folder, PARTITIONS, write_logs)
    else:
        served = serve_by_kafka(KafkaJars(), folder, PARTITIONS, write_logs)
    yield served
    served.stop()


def over_the_wire(broker: Served, **options: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": broker.address, "topic": TOPIC, **options}


def from_folders(broker: Served, **options: str) -> dict[str, str]:
    return {"path": str(broker.data), "topic": TOPIC, **options}


def test_every_table_has_the_rows_of_the_folders(broker: Served) -> None:
    for table in TABLES:
        rows = source_rows(over_the_wire(broker, table=table, splitBytes="100000"))
        assert rows == source_rows(from_folders(broker, table=table)), table
        assert rows


def test_ranges_begin_with_batches_and_cover_the_log(broker: Served) -> None:
    options = SourceOptions.parse(over_the_wire(broker, splitBytes="4096"))
    logs = list_logs(options)
    assert len(logs) == PARTITIONS
    count = 0
    for log in logs:
        ranges = [log_range for log_range, _ in log_ranges(log, options.split_bytes)]
        assert [log_range.end for log_range in ranges[:-1]] == [log_range.start for log_range in ranges[1:]]
        count += len(ranges)
    assert count > 10 * PARTITIONS
    rows = source_rows(over_the_wire(broker, splitBytes="4096"))
    assert rows == source_rows(from_folders(broker))


def test_groups_choose_the_partitions(broker: Served) -> None:
    options = SourceOptions.parse(over_the_wire(broker, groups="etl-tx"))
    assert [log.log_partition for log in list_logs(options)] == [partition_for("etl-tx", PARTITIONS)]
    few = over_the_wire(broker, groups="etl-tx", offsetsTopicPartitions=str(LOG_PARTITIONS))
    rows = source_rows(few)
    assert rows and rows == source_rows(from_folders(broker, groups="etl-tx", offsetsTopicPartitions="8"))


def test_a_stream_continues_in_the_folders_and_over_the_wire(broker: Served) -> None:
    """Each micro-batch is read from the other source than the one before. Each record comes once."""
    for table in ("records", "commits", "group_epochs"):
        rows, offset, random = [], StreamOffset(), Random(table)
        readers = [
            KcoordStreamReader(options, options.table.schema())
            for options in map(
                SourceOptions.parse, (from_folders(broker, table=table), over_the_wire(broker, table=table))
            )
        ]
        batches = 0
        while (end := readers[0].latestOffset(offset, ReadMaxBytes(random.randint(1, 1 << 18)))) != offset:
            rows += batch_rows(readers[1], offset, end)
            readers.reverse()
            offset = end
            batches += 1
        assert batches > 3
        assert readers[1].latestOffset(offset, ReadMaxBytes(1)) == offset
        in_order = sorted(rows, key=lambda row: (row["log_partition"], row["log_offset"]))
        assert in_order == source_rows(from_folders(broker, table=table)), table
