# SPDX-License-Identifier: Apache-2.0
"""Plays transcripts on Apache Kafka and prints the differences.

    python -m tests.transcripts.kafka [FILE ...]

Without FILE it plays all transcripts that can be played on Kafka. Files with the same settings share a broker. `--port`
uses a running broker. `--rewrite REASON` writes different answers of Kafka into the files, with that reason.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from difflib import unified_diff
from pathlib import Path

from tests.support.kafka_broker import KafkaBroker
from tests.support.kafka_jars import KafkaJars
from tests.transcripts.names import Names
from tests.transcripts.stage import SETTINGS, play
from tests.transcripts.stage_kafka import KafkaStage
from tests.transcripts.transcript import FOLDER, Transcript

_RELEASE = "kcoord.release"
VERSIONS = {"4.3": "4.3.1", "4.4": "4.4.0"}
"""The version of Kafka that a transcript is compared with, by its kcoord.release."""


def kafka_settings(transcript: Transcript) -> dict[str, str]:
    """Returns the settings of the transcript without the keys that only kcoord has, except kcoord.release."""
    settings = SETTINGS | transcript.settings
    return {key: value for key, value in settings.items() if key == _RELEASE or not key.startswith("kcoord.")}


def start(settings: dict[str, str], folder: Path) -> KafkaBroker:
    """Starts the version of Kafka that kcoord.release names, with these settings."""
    own = {key.replace(".", "_"): value for key, value in settings.items() if key != _RELEASE}
    return KafkaBroker(KafkaJars(VERSIONS[settings[_RELEASE]]), folder, **own)


def compare(transcript: Transcript, port: int, number: int, rewrite: str | None = None) -> list[str]:
    """Plays a transcript; returns the differences as lines."""
    # A running broker may have groups of earlier runs.
    stage = KafkaStage(Names(f"t{time.time_ns() // 1000 % 10**8}x{number}."), port)
    try:
        answers = asyncio.run(play(transcript, stage))
    except Exception as error:
        return [f"{transcript.path}: {type(error).__name__}: {error}"]
    differences = []
    for command, answer in zip(transcript.commands, answers, strict=True):
        expected, played = stage.mask(command.expected(stage.name)), stage.mask(answer)
        if expected != played:
            differences.append(f"{transcript.path}:{command.line}: {command.text}")
            differences += list(unified_diff(expected, played, "transcript", "kafka", lineterm=""))[2:]
            command.kafka_reason, command.kafka_answer = rewrite or "", played
    if rewrite and differences:
        transcript.write()
    return differences


def playable(paths: Iterable[Path]) -> dict[tuple[tuple[str, str], ...], list[Transcript]]:
    """Returns the transcripts that can be played on Kafka, by the settings of their broker."""
    by_settings = defaultdict(list)
    for path in paths:
        transcript = Transcript.read(path)
        if KafkaStage.name not in transcript.left_out:
            by_settings[tuple(sorted(kafka_settings(transcript).items()))].append(transcript)
    return by_settings


def play_all(paths: Iterable[Path], folder: Path, port: int | None = None, rewrite: str | None = None) -> int:
    """Prints a line for each file, and its differences. Returns the number of files that differ."""
    failed, number = 0, 0
    for settings, transcripts in playable(paths).items():
        broker = None
        if port is None:
            broker = start(dict(settings), folder / f"broker-{number}")
        try:
            for transcript in transcripts:
                number += 1
                differences = compare(transcript, broker.port if broker else port or 0, number, rewrite)
                failed += bool(differences)
                name = transcript.path.relative_to(FOLDER)
                print(f"{'DIFFERS' if differences else 'ok     '} {name}", *differences, sep="\n    ", flush=True)
        finally:
            if broker is not None:
                broker.stop()
    print(f"{number} transcripts, {failed} differ")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="*", type=Path, help="transcripts (default: all)")
    parser.add_argument("--port", type=int, help="port of a running broker on this machine")
    parser.add_argument("--rewrite", metavar="REASON", help="write different answers of Kafka into the files")
    arguments = parser.parse_args()
    files = [path.resolve() for path in arguments.files] or sorted(FOLDER.glob("*/*.txt"))
    with tempfile.TemporaryDirectory(prefix="kcoord-transcripts-") as folder:
        return int(play_all(files, Path(folder), arguments.port, arguments.rewrite) > 0)


if __name__ == "__main__":
    sys.exit(main())
