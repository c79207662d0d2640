# SPDX-License-Identifier: Apache-2.0
"""Follows a topic over the wire in a thread, as a stream of `records` does, while a test does something to brokers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from pyspark.sql.streaming.datasource import ReadAllAvailable

from kcoord.pipeline.log_stream import StreamOffset
from kcoord.pipeline.options import SourceOptions
from kcoord.pipeline.stream import KcoordStreamReader
from tests.support.offsets_sample import Row

_PAUSE_SECONDS = 0.05


class FollowedLog:
    """Follows the topic until the end of the `with`, and then up to the end of the log. `rows` has the records."""

    def __init__(self, address: str, topic: str) -> None:
        options = SourceOptions.parse({"kafka.bootstrap.servers": address, "topic": topic})
        self._reader = KcoordStreamReader(options, options.table.schema())
        self._ending = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self.rows: list[Row] = []
        self.batches = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ending.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def offsets(self) -> dict[object, list[object]]:
        """Returns the log offsets by log partition, in the order in which they were read."""
        offsets: dict[object, list[object]] = {}
        for row in self.rows:
            offsets.setdefault(row["log_partition"], []).append(row["log_offset"])
        return offsets

    def _run(self) -> None:
        offset: StreamOffset = {}
        try:
            while True:
                is_last = self._ending.is_set()
                end = self._reader.latestOffset(offset, ReadAllAvailable())
                self.rows += batch_rows(self._reader, offset, end)
                self.batches += offset != end
                offset = end
                if is_last:
                    return
                self._ending.wait(_PAUSE_SECONDS)
        except BaseException as failure:
            self._failure = failure


def batch_rows(reader: KcoordStreamReader, start: StreamOffset, end: StreamOffset) -> list[Row]:
    """Returns the rows of a micro-batch."""
    return [*_rows(reader, start, end)]


def _rows(reader: KcoordStreamReader, start: StreamOffset, end: StreamOffset) -> Iterator[Row]:
    for work in reader.partitions(start, end):
        for batch in reader.read(work):
            yield from batch.to_pylist()
