# SPDX-License-Identifier: Apache-2.0
"""The garbage collector never looks at the state of a broker as a whole."""

from __future__ import annotations

import gc

from kcoord.server.process import freeze_survivors


def test_survivors_of_both_young_generations_are_frozen() -> None:
    gc.unfreeze()
    try:
        freeze_survivors("start", {"generation": 1})
        freeze_survivors("stop", {"generation": 0})
        assert gc.get_freeze_count() == 0
        freeze_survivors("stop", {"generation": 1})
        assert gc.get_freeze_count() > 0
        assert len(gc.get_objects(generation=2)) == 0
    finally:
        gc.unfreeze()


def test_frozen_objects_are_freed_without_a_collection() -> None:
    class Thing:
        is_gone = False

        def __del__(self) -> None:
            Thing.is_gone = True

    thing = Thing()
    try:
        freeze_survivors("stop", {"generation": 1})
        del thing
        assert Thing.is_gone
    finally:
        gc.unfreeze()
