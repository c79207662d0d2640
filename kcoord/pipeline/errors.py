# SPDX-License-Identifier: Apache-2.0
"""The errors of logs that cannot be read, or that no longer have what a stream expects."""

from __future__ import annotations


class BrokerError(OSError):
    """The brokers of a cluster do not answer, or refuse a request."""


class BrokerUnavailableError(BrokerError):
    """The brokers do not answer at the moment. The same request may succeed later."""


class DataLossError(ValueError):
    """Records that a stream has not read yet may be lost. `failOnDataLoss=false` reads what is there."""


class OtherTopicError(ValueError):
    """The topic was deleted and created again, so its offsets are those of another log."""
