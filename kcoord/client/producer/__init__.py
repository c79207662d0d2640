# SPDX-License-Identifier: Apache-2.0
"""The producer: pure batching, partitioning and sequence numbers, and tasks that send.

Theory of operation. `Producer.send` chooses a partition, appends the record to the last batch of that partition, and
returns a future. The task of `Sender` takes the batches that are ready and sends them, with one task per request. Each
future gets its result when the batch has a final outcome. Everything runs in one event loop.

Order: at most one batch per partition is in flight, and a batch that is retried goes back to the head of its queue. So
the records of a partition are stored in the order of the calls of `send`.

Exactly once: with `enable_idempotence` a batch gets its sequence numbers when it is first sent, and keeps them in each
retry. The broker drops a batch that it has stored already. If the client can no longer know whether a batch was stored,
it gets a new producer id, so that later batches are accepted.

Transactions: `Transactions` has the state and the requests to the coordinator. A batch that fails makes the transaction
abortable, so it cannot be committed without its records.

Nothing is stored locally. After a crash unsent records are lost. An open transaction is aborted by the coordinator, at
its timeout or when the next producer with the same transactional id calls `init_transactions`.
"""
