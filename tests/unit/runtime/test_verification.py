# SPDX-License-Identifier: Apache-2.0
"""The tickets for the first writes of transactions."""

from __future__ import annotations

from kcoord.runtime.verification import Verifications


def test_a_ticket_is_valid_until_the_write_or_the_end_of_its_producers_transaction() -> None:
    verifications = Verifications()
    first, second, other = (verifications.start(producer_id) for producer_id in (7, 7, 8))
    assert len({first, second, other}) == 3
    assert len(verifications) == 2, "producers"
    assert verifications.holds(7, first)
    assert verifications.holds(7, second)
    assert not verifications.holds(8, first), "the ticket belongs to another producer"
    verifications.finish(7, first)
    assert not verifications.holds(7, first)
    assert verifications.holds(7, second)
    verifications.end(8)
    assert not verifications.holds(8, other)
    verifications.finish(8, other)
    verifications.finish(7, first)
    assert len(verifications) == 1
    verifications.finish(7, second)
    assert len(verifications) == 0
    third = verifications.start(7)
    verifications.end(7)
    assert not verifications.holds(7, third)
    assert len(verifications) == 0
