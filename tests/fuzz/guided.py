# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.fuzz.guided [TARGET...]`: coverage-guided fuzzing with atheris (`make fuzz`).

Each target runs for --seconds, starting with its seeds and the inputs in `inputs/guided`. With --keep, inputs that
reach new code are added there. A finding ends the run and prints the input in hexadecimal. It belongs into a test.
"""

from __future__ import annotations

import argparse
import importlib
import subprocess
import sys
import tempfile
from pathlib import Path

TARGETS = ("requests", "batches", "subscriptions", "regexes", "sasl", "tokens", "jaas")
LONGEST_BYTES = 1024
MOST_KEPT_BYTES = 32 * 1024
"""The limit per target. The shortest inputs are kept first."""


def run_target(name: str, arguments: list[str]) -> None:
    """Runs a target in this process, which atheris ends."""
    atheris = importlib.import_module("atheris")  # an optional dependency without type hints
    with atheris.instrument_imports(include=["kcoord", "kcoord_protocol"]):
        targets = importlib.import_module("tests.fuzz.targets")
    target, _ = targets.TARGETS[name]
    if name in ("requests", "subscriptions"):
        for decoders in targets.compiled_decoders():
            for version, decoder in decoders.items():
                decoders[version] = atheris.instrument_func(decoder)
    atheris.Setup([sys.argv[0], *arguments], target)
    atheris.Fuzz()


def _spawn(name: str, *arguments: str) -> int:
    command = [sys.executable, "-m", "tests.fuzz.guided", "--run", name, "--", *arguments]
    return subprocess.run(command).returncode


def fuzz(name: str, seconds: int, keep: bool) -> bool:
    """Fuzzes a target in a child process. Returns whether nothing was found."""
    # Not imported at the top, since the fuzzing process has to import it with instrumentation.
    from tests.fuzz.targets import kept, seeds_of

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        corpus, findings = folder / "corpus", folder / "found"
        for directory in (corpus, findings):
            directory.mkdir()
        for number, data in enumerate([*seeds_of(name), *kept(name)]):
            (corpus / f"seed-{number}").write_bytes(data)
        limits = [f"-max_len={LONGEST_BYTES}", "-timeout=10", "-rss_limit_mb=2048", f"-artifact_prefix={findings}/"]
        code = _spawn(name, str(corpus), f"-max_total_time={seconds}", "-print_final_stats=1", *limits)
        for artifact in findings.iterdir():
            print(f"{name}: {artifact.name}: {artifact.read_bytes().hex()}")
        if keep:
            added = [path.read_bytes() for path in corpus.iterdir() if not path.name.startswith("seed-")]
            _write(name, [*kept(name), *added])
        return code == 0


def _write(name: str, inputs: list[bytes]) -> None:
    lines: list[str] = []
    for data in sorted(set(inputs), key=lambda data: (len(data), data)):
        lines.append(data.hex() + "\n")
        if sum(map(len, lines)) > MOST_KEPT_BYTES:
            lines.pop()
            break
    from tests.fuzz.targets import CORPUS

    (CORPUS / f"{name}.txt").write_text("".join(lines))
    print(f"{name}: kept {len(lines)} of {len(inputs)} inputs")


def main() -> int:
    parser = argparse.ArgumentParser(description="Coverage-guided fuzzing of bytes that clients can send.")
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"one of {', '.join(TARGETS)} (default: all)")
    parser.add_argument("--seconds", type=int, default=60, help="for each target (default 60)")
    parser.add_argument("--keep", action="store_true", help="keep inputs that reach new code")
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        run_target(options.targets[0], options.targets[1:])
        return 0
    unknown = set(options.targets) - set(TARGETS)
    if unknown:
        parser.error(f"unknown targets: {', '.join(sorted(unknown))}")
    sound = [fuzz(name, options.seconds, options.keep) for name in options.targets or TARGETS]
    return 0 if all(sound) else 1


if __name__ == "__main__":
    sys.exit(main())
