# SPDX-License-Identifier: Apache-2.0
"""Plays every transcript on every stage but Kafka. KCOORD_REWRITE=1 writes the core's answers into the files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.transcripts.names import Names
from tests.transcripts.stage import Stage, play
from tests.transcripts.stage_core import CoreStage
from tests.transcripts.stage_server import FastServerStage, ServerStage
from tests.transcripts.stage_simulation import SimulationStage
from tests.transcripts.transcript import FOLDER, Transcript

FILES = sorted(FOLDER.glob("*/*.txt"))
STAGES: dict[str, type[Stage]] = {
    stage.name: stage for stage in (CoreStage, ServerStage, FastServerStage, SimulationStage)
}
REWRITES = bool(os.environ.get("KCOORD_REWRITE"))

PLAYS = [
    pytest.param(path, stage, id=f"{path.parent.name}/{path.stem}-{stage}")
    for path in FILES
    for stage in STAGES
    if stage not in Transcript.read(path).left_out
]


@pytest.mark.parametrize(("path", "stage"), PLAYS)
async def test_transcript(path: Path, stage: str) -> None:
    transcript = Transcript.read(path)
    player = STAGES[stage](Names())
    answers = await play(transcript, player)
    if REWRITES and stage == CoreStage.name:
        for command, answer in zip(transcript.commands, answers, strict=True):
            command.answer = answer
        transcript.write()
        return
    for command, answer in zip(transcript.commands, answers, strict=True):
        expected = player.mask(command.expected(stage))
        assert player.mask(answer) == expected, f"{path}:{command.line}: {command.text}"
