# SPDX-License-Identifier: Apache-2.0
"""`python -m tests.shape`: prints the shape of the code, and fails if a figure is above its limit.

The limits are a ratchet: a figure that falls lowers its limit in the same change, and no change raises one.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Final

from tests.shape.heartbeat import joining_heartbeat
from tests.shape.source import ROOT, functions, import_circles, modules_per_folder, only_forwards, single_call

FILES_OF_A_HEARTBEAT: Final = "files that a joining heartbeat passes"
FORWARDING_PERCENT: Final = "functions of kcoord/server that only forward, in percent"
ONE_CALL_PERCENT: Final = "functions of kcoord/server whose body is one call of any kind, in percent"
MODULES_PER_FOLDER: Final = "most modules in a folder of kcoord/server and kcoord/coordinator"
MODULES_IN_CIRCLES: Final = "modules in import circles"

LIMITS: Final[dict[str, float]] = {
    FILES_OF_A_HEARTBEAT: 25,
    FORWARDING_PERCENT: 3.0,
    ONE_CALL_PERCENT: 17.0,
    MODULES_PER_FOLDER: 24,
    MODULES_IN_CIRCLES: 0,
}


@dataclass(slots=True)
class Figure:
    """One measured figure and the lines that explain it."""

    name: str
    value: float
    lines: list[str]


def heartbeat_figure() -> Figure:
    way = joining_heartbeat()
    lines = [f"{file}: {', '.join(sorted(names))}" for file, names in sorted(way.functions.items())]
    return Figure(FILES_OF_A_HEARTBEAT, len(way.functions), [*lines, f"{way.function_count} functions"])


def function_figures() -> list[Figure]:
    in_server = list(functions(ROOT / "kcoord" / "server"))
    forwarding = [place for place, function in in_server if only_forwards(function)]
    calling = sum(1 for _, function in in_server if single_call(function) is not None)
    total = len(in_server)
    return [
        Figure(FORWARDING_PERCENT, _percent(len(forwarding), total), [*forwarding, f"{len(forwarding)} of {total}"]),
        Figure(ONE_CALL_PERCENT, _percent(calling, total), [f"{calling} of {total}"]),
    ]


def _percent(part: int, total: int) -> float:
    return round(100 * part / total, 1)


def folders_figure() -> Figure:
    counts = modules_per_folder()
    return Figure(MODULES_PER_FOLDER, max(counts.values()), [f"{count:3} {name}" for name, count in counts.items()])


def circles_figure() -> Figure:
    circles = import_circles()
    return Figure(MODULES_IN_CIRCLES, sum(map(len, circles)), [", ".join(circle) for circle in circles])


def main() -> int:
    too_large = []
    for figure in (heartbeat_figure(), *function_figures(), folders_figure(), circles_figure()):
        limit = LIMITS[figure.name]
        print(f"{figure.name}: {figure.value:g} (limit {limit:g})")
        for line in figure.lines:
            print(f"    {line}")
        if figure.value > limit:
            too_large.append(figure.name)
    for name in too_large:
        print(f"above its limit: {name}", file=sys.stderr)
    return 1 if too_large else 0


if __name__ == "__main__":
    sys.exit(main())
