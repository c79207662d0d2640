# SPDX-License-Identifier: Apache-2.0
"""The order in which the processes of pytest-xdist take the test files.

A process takes whole files, so that the tests of a file share its fixtures. Two rules differ from `--dist loadfile`:

* The files that use Spark are one unit in a run of up to four processes, and this unit is the first. They share one
  JVM, which takes 20 s of CPU time to start and to warm up. In a run of more processes this unit would be the longest
  part, so each of its files stays a unit.
* The other files are taken in the order of collection, in which the long files of integration tests come before the
  short files of unit tests. With xdist's own order, by the number of tests, the longest files come last, and one
  process waits for the other.
"""

from __future__ import annotations

from typing import Final

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

SPARK_FOLDERS: Final = ("tests/integration/lake/", "tests/integration/pipeline/")
_SPARK: Final = "spark"
_MOST_PROCESSES: Final = 4


def uses_spark(nodeid: str) -> bool:
    return nodeid.startswith(SPARK_FOLDERS)


class LongFilesFirst(LoadFileScheduling):  # type: ignore[misc]
    """Expects that the processes collect the files that use Spark first (`put_spark_first`)."""

    assigned_work: dict[WorkerController, dict[str, dict[str, bool]]]
    """The tests of each process by file, and whether they are done."""
    registered_collections: dict[WorkerController, list[str]]

    def __init__(self, config: pytest.Config, log: Producer | None) -> None:
        super().__init__(config, log)
        config.option.loadscopereorder = False

    def _split_scope(self, nodeid: str) -> str:
        if uses_spark(nodeid) and self.numnodes <= _MOST_PROCESSES:
            return _SPARK
        return str(super()._split_scope(nodeid))

    def remove_node(self, node: WorkerController) -> str | None:
        """Gives the tests that a process has left to others. Returns the test that ended it, None if all are done.

        xdist would give the finished files away as well. A process that gets a file without a test to run waits for
        ever. It would also repeat the test that ended the process, which then ends the next one.

        xdist also keeps what the ended process had collected, and would give a file to its replacement before that has
        collected its tests.
        """
        units = self.assigned_work.pop(node)
        left = {scope: tests for scope, tests in units.items() if not all(tests.values())}
        if not left:
            return None
        del self.registered_collections[node]
        scope = next(iter(left))
        crashed = next(nodeid for nodeid, is_done in left[scope].items() if not is_done)
        left[scope][crashed] = True
        self.workqueue.update({scope: tests for scope, tests in left.items() if not all(tests.values())})
        for other in self.assigned_work:
            self._reschedule(other)
        return crashed


def put_spark_first(items: list[pytest.Item]) -> None:
    """Sorts the collected tests. Those that use Spark come first; otherwise the order stays."""
    items.sort(key=lambda item: not uses_spark(item.nodeid))
