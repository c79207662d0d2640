# SPDX-License-Identifier: Apache-2.0
"""The leader epoch cache answers as Kafka's does: for exact epochs, gaps, later epochs and dropped epochs."""

from __future__ import annotations

import pytest

from kcoord.topics.leader_epochs import EpochEntry, LeaderEpochs


def cache() -> LeaderEpochs:
    return LeaderEpochs([EpochEntry(1, 10), EpochEntry(3, 20), EpochEntry(6, 35)])


@pytest.mark.parametrize(
    ("epoch", "expected"),
    [(-1, (-1, -1)), (0, (0, 10)), (1, (1, 20)), (2, (1, 20)), (3, (3, 35)), (5, (3, 35)), (6, (6, 50)), (7, (-1, -1))],
)
def test_end_offset_for_epoch(epoch: int, expected: tuple[int, int]) -> None:
    assert cache().end_offset_for(epoch, 50) == expected


def test_an_empty_cache_returns_undefined_epochs() -> None:
    assert LeaderEpochs().end_offset_for(0, 50) == (-1, -1)
    assert LeaderEpochs().epoch_for_offset(3) == -1


@pytest.mark.parametrize(("offset", "epoch"), [(9, -1), (10, 1), (19, 1), (20, 3), (99, 6)])
def test_epoch_for_offset(offset: int, epoch: int) -> None:
    assert cache().epoch_for_offset(offset) == epoch


def test_assigning_an_older_epoch_changes_nothing() -> None:
    epochs = cache()
    assert not epochs.assign(6, 40)
    assert not epochs.assign(2, 40)
    assert epochs.entries == cache().entries


def test_a_new_epoch_replaces_an_epoch_that_wrote_nothing() -> None:
    epochs = cache()
    assert epochs.assign(8, 35)
    assert epochs.entries == [(1, 10), (3, 20), (8, 35)]


def test_advancing_the_start_keeps_the_epoch_that_wrote_the_new_start() -> None:
    epochs = cache()
    assert epochs.advance_start(25)
    assert epochs.entries == [(3, 25), (6, 35)]
    assert not epochs.advance_start(25)
    assert not cache().advance_start(5)


def test_truncating_the_end_drops_epochs_that_began_there() -> None:
    epochs = cache()
    assert epochs.truncate_end(35)
    assert epochs.entries == [(1, 10), (3, 20)]
    assert not epochs.truncate_end(35)


def test_text_is_kafkas_checkpoint_format() -> None:
    assert cache().to_text() == "0\n3\n1 10\n3 20\n6 35\n"
