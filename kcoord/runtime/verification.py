# SPDX-License-Identifier: Apache-2.0
"""Guards the first write of a transaction to one log (KIP-890).

The transaction may end between the question to its coordinator and the write. The write must fail then, or it would
become part of a transaction that nobody ends.

The writer takes a ticket before it asks the coordinator. A transaction marker voids the tickets of its producer. The
first write without a valid ticket fails with INVALID_TXN_STATE. Tickets are not stored: a restart voids all of them.
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
        """Returns a ticket for one write."""
        ticket = next(self._numbers)
        self._tickets.setdefault(producer_id, set()).add(ticket)
        return ticket

    def holds(self, producer_id: int, ticket: int) -> bool:
        """True if no marker of the producer's transaction arrived since the ticket was taken."""
        return ticket in self._tickets.get(producer_id, ())

    def finish(self, producer_id: int, ticket: int) -> None:
        """Removes the ticket of a write that was made or abandoned."""
        tickets = self._tickets.get(producer_id)
        if tickets is not None:
            tickets.discard(ticket)
            if not tickets:
                del self._tickets[producer_id]

    def end(self, producer_id: int) -> None:
        """Voids all tickets of the producer, whose transaction has ended."""
        self._tickets.pop(producer_id, None)
