# SPDX-License-Identifier: Apache-2.0
"""Streams the table `records` into Parquet until it is killed. The arguments are DATA OUT CHECKPOINT FOLDER."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.support.spark import start_spark


def main() -> None:
    data, out, checkpoint, folder = sys.argv[1:]
    spark = start_spark(Path(folder))
    stream = spark.readStream.format("kcoord").option("maxBytesPerTrigger", "3000").load(data)
    query = (
        stream.select("log_partition", "log_offset", "transaction", "effective_offset")
        .writeStream.format("parquet")
        .option("path", out)
        .option("checkpointLocation", checkpoint)
        .trigger(processingTime="0 seconds")
        .start()
    )
    query.awaitTermination()


if __name__ == "__main__":
    main()
