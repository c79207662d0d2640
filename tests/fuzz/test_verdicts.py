# SPDX-License-Identifier: Apache-2.0
"""The broker reacts to malformed requests as Kafka 4.3.1 does, except for the reasons in docs/differences.md.

`python -m tests.fuzz.verdicts` has recorded Kafka's verdicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.verdicts import REASONS, RECORDED, SETTINGS, name_of, prepare, verdict
from tests.support.kcoord_process import KcoordProcess

PATIENCE_SECONDS = 20.0
"""The timeout of a response that has to come."""
SILENCE_SECONDS = 0.1


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[KcoordProcess]:
    process = KcoordProcess(tmp_path, {**SETTINGS, "kcoord.release": "4.3"}).start()
    yield process
    process.kill()


def test_the_verdicts_of_kafka(broker: KcoordProcess) -> None:
    prepare(broker.port)
    lines = [line.split() for line in RECORDED.read_text().splitlines()]
    assert len(lines) > 500
    differing = []
    for text, theirs, *differs in lines:
        frame = bytes.fromhex(text)
        expected, why = differs or (theirs, "")
        assert why in REASONS, f"no reason is known for {name_of(frame)}"
        seconds = SILENCE_SECONDS if expected == "silent" else PATIENCE_SECONDS
        actual = verdict(broker.port, frame, seconds) or "-"
        if actual != expected:
            differing.append(f"{name_of(frame)}: {actual} instead of {expected}: {text}")
    assert not differing, "\n".join(differing)
    assert "Traceback" not in broker.log
