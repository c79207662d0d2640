# SPDX-License-Identifier: Apache-2.0
"""Models of a client with quotas, which produces and fetches all the time, and of the operator of its quotas."""

from __future__ import annotations

from random import Random
from typing import Final

from kcoord.simulation.client import RETRY_MS, Scene, SimulatedClient
from kcoord.simulation.ledger import Place
from kcoord.simulation.principals import GUEST_TOPIC, SENDER
from kcoord.simulation.quota_watch import FETCH_KEY, PRODUCE_KEY
from kcoord.simulation.record_producer import produce_request
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import AlterClientQuotasRequest, AlterClientQuotasResponse, FetchRequest
from kcoord_protocol.record_batch import Record, encode_batch

_PRODUCE_VERSION: Final = 11
_FETCH_VERSION: Final = 12
_VALUE_BYTES: Final = 600
_LONGEST_REST_MS: Final = 120
_FIRST_MS: Final = 1_500
"""When the broker accepts connections."""
_PATIENCE_MS: Final = 6_000
"""A client that gives up throttled requests gets one more request served with each new connection."""
_ALTER_VERSION: Final = 1
_STRAY_MS: Final = 2_000
_OTHER_PROBABILITY: Final = 0.7
_REPEATABLE: Final = frozenset({Errors.NOT_CONTROLLER, Errors.REQUEST_TIMED_OUT})
_CLIENT_ID: Final = f"{SENDER}/0"
_ENTITIES: Final[tuple[tuple[tuple[str, str | None], ...], ...]] = (
    (("user", SENDER),),
    (("user", SENDER),),
    (("user", SENDER), ("client-id", _CLIENT_ID)),
    (("user", SENDER), ("client-id", None)),
    (("client-id", _CLIENT_ID),),
)
"""Entities of the sender alone: the quotas of all users would throttle the crew."""
_RATES: Final = (300.0, 500.0, 800.0)


class ThrottledClient(SimulatedClient):
    """Produces and fetches in turns, one request at a time, with hardly a rest."""

    def __init__(self, scene: Scene) -> None:
        super().__init__(_CLIENT_ID, scene)

    def start(self) -> None:
        self.clock.after(_FIRST_MS, self._send)

    def settle(self) -> None:
        """Does nothing: a throttled client may wait for longer than the groups need to settle."""

    def is_settled(self) -> bool:
        return True

    def on_timeout(self) -> None:
        self.clock.after(RETRY_MS, self._send)

    def _send(self) -> None:
        if self.random.random() < 0.5:
            batch = encode_batch([Record(None, bytes(_VALUE_BYTES), timestamp_ms=self.clock.now_ms)])
            request = produce_request(Place(GUEST_TOPIC, 0), bytes(16), batch)
            self.request(ApiKey.PRODUCE, _PRODUCE_VERSION, "", request, self._answered, timeout_ms=_PATIENCE_MS)
        else:
            partition = FetchRequest.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=_VALUE_BYTES)
            fetch = FetchRequest(
                max_wait_ms=0,
                min_bytes=0,
                max_bytes=_VALUE_BYTES,
                session_id=0,
                session_epoch=-1,
                topics=[FetchRequest.FetchTopic(topic=GUEST_TOPIC, partitions=[partition])],
                forgotten_topics_data=[],
                rack_id="",
            )
            self.request(ApiKey.FETCH, _FETCH_VERSION, "", fetch, self._answered, timeout_ms=_PATIENCE_MS)

    def _answered(self, body: bytes) -> None:
        self.clock.after(self.random.randint(1, _LONGEST_REST_MS), self._send)


class QuotaAdmin(SimulatedClient):
    """Sets and removes quotas, of the sender and more often of others, one change at a time, as `AclAdmin` does."""

    def __init__(self, scene: Scene) -> None:
        super().__init__("quota-admin", scene)
        self._trace = scene.trace
        self._change: AlterClientQuotasRequest | None = None
        self._times_sent = 0
        self._resting_until_ms = 0
        self._is_first = True

    def on_timeout(self) -> None:
        if self._change is not None:
            self._send()

    def change(self, random: Random) -> None:
        if self._change is not None or self.clock.now_ms < self._resting_until_ms:
            return
        if not self._is_first and random.random() < _OTHER_PROBABILITY:
            entity: tuple[tuple[str, str | None], ...] = (("user", f"other-{random.randrange(3)}"),)
            rate: float | None = float(random.randint(1, 1_000))
        else:
            entity, rate = random.choice(_ENTITIES), random.choice((*_RATES, None))
            if self._is_first:
                rate = _RATES[0]
        self._is_first = False
        operation = AlterClientQuotasRequest.OpData(
            key=random.choice((PRODUCE_KEY, FETCH_KEY)), value=rate or 0.0, remove=rate is None
        )
        entry = AlterClientQuotasRequest.EntryData(
            entity=[
                AlterClientQuotasRequest.EntityData(entity_type=entity_type, entity_name=name)
                for entity_type, name in entity
            ],
            ops=[operation],
        )
        self._change = AlterClientQuotasRequest(entries=[entry], validate_only=False)
        self._times_sent = 0
        self._send()

    def _send(self) -> None:
        change = self._change
        assert change is not None
        self._times_sent += 1
        self.request(ApiKey.ALTER_CLIENT_QUOTAS, _ALTER_VERSION, "", change, self._answered)

    def _answered(self, body: bytes) -> None:
        (entry,) = AlterClientQuotasResponse.decode(body, _ALTER_VERSION).entries
        if not entry.error_code:
            self._trace.add("quotas-changed", str(self._change))
            self._change = None
            self._resting_until_ms = self.clock.now_ms + (_STRAY_MS if self._times_sent > 1 else 0)
        elif entry.error_code in _REPEATABLE:
            self.clock.after(RETRY_MS, self.on_timeout)
        else:
            raise self.unexpected(entry.error_code, str(self._change))
