# SPDX-License-Identifier: Apache-2.0
"""The admin client: one module per family of calls, and one class that has them all.

Each call has a deadline. Within it, two loops retry:

- `Cluster.retry` repeats an attempt that fails as a whole with a retriable error, for example a lost connection.
- `repeat` repeats an attempt for those keys (topics, groups, partitions, configs) whose own error may pass, for example
  NOT_CONTROLLER or NOT_COORDINATOR. The other keys keep their outcome and are not sent again.

So a call that creates or deletes is sent at least once. If a response is lost, the retry may return the error of a
repeated change, such as TOPIC_ALREADY_EXISTS, although the first request succeeded.
"""
