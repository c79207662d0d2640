# SPDX-License-Identifier: Apache-2.0
"""The completions of a large group, which are made a few at a time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kcoord.runtime.result import Completion, CoordinatorResult, OperationContext
from kcoord.runtime.shard_set import REPLIES_AT_ONCE
from kcoord.runtime.waiting import ShardState
from kcoord_protocol.errors import Errors
from tests.unit.runtime.ledger import SHARD, WAIT, Bench, Ledger

WAITING = 2 * REPLIES_AT_ONCE + 3


class Completions:
    """Completes the requests with the tokens 1 to WAITING, and counts the completions that were made."""

    def __init__(self, error: Exception | None = None) -> None:
        self.made = 0
        self._error = error

    def operation(self, ledger: Ledger, context: OperationContext) -> CoordinatorResult[str]:
        return CoordinatorResult("begun", bulk_completions=[self._make()])

    def _make(self) -> Iterator[Completion]:
        for token in range(1, WAITING + 1):
            if self._error is not None and self.made == REPLIES_AT_ONCE + 1:
                raise self._error
            self.made += 1
            yield Completion(token, f"response {token}")


@pytest.fixture
def bench() -> Bench:
    """A bench with WAITING requests that wait for an event."""
    bench = Bench()
    bench.load()
    for _ in range(WAITING):
        assert bench.run(Ledger.wait) is WAIT
    return bench


def responses(first: int, last: int) -> list[tuple[object, object]]:
    return [(token, f"response {token}") for token in range(first, last + 1)]


def test_each_poll_makes_a_limited_number_of_completions(bench: Bench) -> None:
    completions = Completions()
    assert bench.run(completions.operation) == "begun"
    assert completions.made == 0
    assert bench.replies(bench.poll()) == responses(1, REPLIES_AT_ONCE)
    assert completions.made == REPLIES_AT_ONCE
    assert bench.run(Ledger.get, "a") is None, "other operations run in between"
    assert bench.runtime.has_replies() and bench.runtime.has_ready(bench.now_ms) and not bench.runtime.is_idle()
    assert bench.replies(bench.poll()) == responses(REPLIES_AT_ONCE + 1, 2 * REPLIES_AT_ONCE)
    assert bench.replies(bench.poll()) == responses(2 * REPLIES_AT_ONCE + 1, WAITING)
    assert not bench.runtime.has_replies() and not bench.runtime.has_ready(bench.now_ms) and bench.runtime.is_idle()


def test_a_poll_gives_a_limited_number_of_replies(bench: Bench) -> None:
    for token in range(1, WAITING + 1):
        bench.run(Ledger.complete, token, f"response {token}")
    polls = [bench.replies(bench.poll()) for _ in range(4)]
    assert [len(replies) for replies in polls] == [REPLIES_AT_ONCE, REPLIES_AT_ONCE, 3, 0]
    assert [reply for replies in polls for reply in replies] == responses(1, WAITING)


def test_completions_share_a_poll_with_earlier_replies(bench: Bench) -> None:
    late = bench.run(Ledger.wait), bench.run(Ledger.wait)
    assert late == (WAIT, WAIT)
    bench.run(Completions().operation)
    bench.run(Ledger.complete, WAITING + 1, "first")
    bench.run(Ledger.complete, WAITING + 2, "second")
    replies = bench.replies(bench.poll())
    assert replies == [(WAITING + 1, "first"), (WAITING + 2, "second"), *responses(1, REPLIES_AT_ONCE - 2)]


def test_several_bulk_completions_are_made_in_their_order(bench: Bench) -> None:
    more = Completions()
    bench.run(Completions().operation)
    bench.run(more.operation)
    replies = [reply for _ in range(3) for reply in bench.replies(bench.poll())]
    assert replies == responses(1, WAITING)
    assert more.made == REPLIES_AT_ONCE - 3, "these requests are answered already"
    while bench.runtime.has_replies():
        assert bench.replies(bench.poll()) == []
    assert more.made == WAITING


def test_completions_wait_for_the_records_that_the_operation_may_have_read(bench: Bench) -> None:
    bench.run(Ledger.put, "a", 1)
    writing = bench.poll()
    completions = Completions()
    assert bench.run(completions.operation) is WAIT
    made = []
    while bench.runtime.has_replies():
        assert bench.replies(bench.poll()) == []
        made.append(completions.made)
    assert made == [REPLIES_AT_ONCE, 2 * REPLIES_AT_ONCE, WAITING]
    replies = bench.written(writing)
    while bench.runtime.has_replies():
        replies += bench.replies(bench.poll())
    assert replies == [(WAITING + 1, "a=1"), (WAITING + 2, "begun"), *responses(1, WAITING)]


def test_a_shard_that_fails_meanwhile_answers_every_request_once(bench: Bench) -> None:
    completions = Completions()
    bench.run(completions.operation)
    assert bench.replies(bench.poll()) == responses(1, REPLIES_AT_ONCE)
    bench.runtime.fail_shard(SHARD, "a test")
    replies = []
    while bench.runtime.has_replies():
        replies += bench.replies(bench.poll())
    assert replies == [(token, Errors.NOT_COORDINATOR) for token in range(REPLIES_AT_ONCE + 1, WAITING + 1)]
    assert completions.made == REPLIES_AT_ONCE
    bench.load()
    assert bench.replies(bench.poll()) == []


@pytest.mark.parametrize("error", [AssertionError("a test"), ValueError("a test")])
def test_a_completion_that_cannot_be_made_fails_the_shard(bench: Bench, error: Exception) -> None:
    bench.run(Completions(error).operation)
    assert bench.replies(bench.poll()) == responses(1, REPLIES_AT_ONCE)
    assert bench.runtime.state(SHARD) is ShardState.ACTIVE
    replies = []
    while bench.runtime.has_replies():
        replies += bench.replies(bench.poll())
    assert replies == [(token, Errors.NOT_COORDINATOR) for token in range(REPLIES_AT_ONCE + 1, WAITING + 1)]
    assert bench.runtime.state(SHARD) is ShardState.FAILED
    assert bench.runtime.statistics.invariants_broken == isinstance(error, AssertionError)
