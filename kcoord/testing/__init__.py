# SPDX-License-Identifier: Apache-2.0
"""Brokers for tests: `start_broker`, and with pytest the fixture `kcoord_broker`.

A broker starts in a few milliseconds in a thread of the test's process, on a free port, with its files in memory.
Real clients connect to it over TCP. See docs/testing.md.
"""

from kcoord.testing.broker import InjectedFault, KcoordBroker, Mode, Record, Request, StoredRecord, start_broker
from kcoord.testing.errors import ControlError, WaitTimeout
from kcoord.testing.group_view import Group, Member
from kcoord.testing.security import allow

__all__ = [
    "ControlError",
    "Group",
    "InjectedFault",
    "KcoordBroker",
    "Member",
    "Mode",
    "Record",
    "Request",
    "StoredRecord",
    "WaitTimeout",
    "allow",
    "start_broker",
]
