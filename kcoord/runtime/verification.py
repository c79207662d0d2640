# SPDX-License-Identifier: Apache-2.0
"""Guards the first write of a transaction into one log (KIP-890): between asking the transaction coordinator and
writing, the transaction may have ended, and then the write must not happen any more.

A ticket is taken before the coordinator is asked, and a transaction marker voids the tickets of its producer. All of it
is soft state: without a ticket the producer is asked to begin again.
"""

from __future__ import annotations

from itertools import count


class Verifications:
    """The tickets of one log."""

    __slots__ = ("_numbers", "_tickets")

    def __init__(self) -> None:
        self._tickets: dict[int, set[int]] = {}
        self._numbers = count(1)

    def __len__(self) -> int:
        return len(self._tickets)

    def start(self, producer_id: int) -> int:
        """A ticket for one write."""
        ticket = next(self._numbers)
        self._tickets.setdefault(producer_id, set()).add(ticket)
        return ticket

    def holds(self, producer_id: int, ticket: int) -> bool:
        """Whether no marker came since the ticket was taken."""
        return ticket in self._tickets.get(producer_id, ())

    def finish(self, producer_id: int, ticket: int) -> None:
        """The write was made, or given up."""
        tickets = self._tickets.get(producer_id)
        if tickets is not None:
            tickets.discard(ticket)
            if not tickets:
                del self._tickets[producer_id]

    def end(self, producer_id: int) -> None:
        """The producer's transaction has ended."""
        self._tickets.pop(producer_id, None)
