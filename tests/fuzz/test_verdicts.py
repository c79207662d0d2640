# SPDX-License-Identifier: Apache-2.0
"""What Kafka 4.3.1 said to requests that nobody should send (`python -m tests.fuzz.verdicts` has recorded it), against
what a broker says here: the same, but for the reasons that docs/differences.md gives.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fuzz.verdicts import REASONS, RECORDED, SETTINGS, name_of, prepare, verdict
from tests.support.kcoord_process import KcoordProcess

PATIENCE_SECONDS = 20.0
"""For an answer that has to come."""
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
    found = []
    for text, theirs, *differs in lines:
        frame = bytes.fromhex(text)
        wanted, why = differs or (theirs, "")
        assert why in REASONS, f"no reason is known for {name_of(frame)}"
        seconds = SILENCE_SECONDS if wanted == "silent" else PATIENCE_SECONDS
        said = verdict(broker.port, frame, seconds) or "-"
        if said != wanted:
            found.append(f"{name_of(frame)}: {said} instead of {wanted}: {text}")
    assert not found, "\n".join(found)
    assert "Traceback" not in broker.log
