# SPDX-License-Identifier: Apache-2.0
"""A few transcripts on Apache Kafka; `make transcripts` plays all of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.kafka_broker import KafkaBroker
from tests.transcripts.kafka import compare, kafka_settings, start
from tests.transcripts.transcript import FOLDER, Transcript

FILES = (
    "classic/protocols.txt",
    "consumer/epochs.txt",
    "consumer/revocation.txt",
    "offsets/older_epoch.txt",
    "offsets/record_versions.txt",
)
"""Transcripts without settings, which can share one broker."""


@pytest.fixture(scope="module")
def kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KafkaBroker]:
    settings = kafka_settings(Transcript.read(FOLDER / FILES[0]))
    broker = start(settings, tmp_path_factory.mktemp("kafka"))
    try:
        yield broker
    finally:
        broker.stop()


@pytest.mark.parametrize("name", FILES)
def test_transcript_on_kafka(kafka: KafkaBroker, name: str) -> None:
    path: Path = FOLDER / name
    assert compare(Transcript.read(path), kafka.port, FILES.index(name)) == []
