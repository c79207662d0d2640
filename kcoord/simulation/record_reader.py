# SPDX-License-Identifier: Apache-2.0
"""A model of a reader of records, which checks each Fetch response against the ledger."""

from __future__ import annotations

from typing import Final

from kcoord.simulation.client import RETRY_MS, Scene, SimulatedClient
from kcoord.simulation.ledger import RECORD_PARTITIONS, RECORD_TOPICS, Glance, Ledger, Place
from kcoord.simulation.promises import Promises
from kcoord.simulation.record_producer import REFUSED
from kcoord.simulation.trace import ViolationError
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.control_records import ControlRecordType, decode_control_key
from kcoord_protocol.errors import Errors
from kcoord_protocol.messages import FetchRequest, FetchResponse
from kcoord_protocol.record_batch import decode_entries, iter_headers, walk_batches

_VERSIONS: Final = (7, 12, 13, 17)
_FIRST_VERSION_WITH_IDS: Final = 13
_WAITS_MS: Final = (0, 100, 1_000)
_LAST_WAIT_MS: Final = 3_000
_LONGEST_REST_MS: Final = 800
_SESSION_ERRORS: Final = frozenset({Errors.FETCH_SESSION_ID_NOT_FOUND, Errors.INVALID_FETCH_SESSION_EPOCH})
_BEGIN_ANEW_PROBABILITY: Final = 0.03
_NO_LIMIT: Final = 1 << 20
_PROMPTLY_MS: Final = 500
_PLACES: Final = [Place(topic, number) for topic in RECORD_TOPICS for number in range(RECORD_PARTITIONS)]
_L4: Final = "L-4 a fetch waits for data, and no longer"


class RecordReader(SimulatedClient):
    """Fetches all partitions from its positions, and waits at the broker for more.

    It fetches with or without a session, topics by name or by id, at isolation level read_uncommitted or
    read_committed. Like a client library, it skips records before its position, and records of transactions that the
    response lists as aborted.
    """

    def __init__(
        self,
        name: str,
        scene: Scene,
        promises: Promises,
        ledger: Ledger,
        *,
        is_committed: bool,
    ) -> None:
        super().__init__(name, scene)
        self._trace = scene.trace
        self._promises = promises
        self._ledger = ledger
        self._is_committed = is_committed
        self._version = self.random.choice(_VERSIONS)
        self._has_sessions = self.random.random() < 0.6
        self._session = 0, 0 if self._has_sessions else -1
        self._positions = dict.fromkeys(_PLACES, 0)
        self._told: dict[Place, int] = {}
        """Positions as the fetch session has them: those that the last requests have sent."""
        self._ends: dict[Place, int] = {}
        """High watermarks by partition, from the last response that had one."""
        self._goal: dict[Place, int] = {}
        self._is_settling = False
        self._rest_number = 0

    def start(self) -> None:
        self._rest(self.random.randint(0, _LONGEST_REST_MS))

    def settle(self) -> None:
        self._goal = {place: self._ledger.end_offset(place) for place in _PLACES}
        self._is_settling = True
        # On a new connection no request waits behind an earlier, held-up one.
        self.reconnect()
        self._begin_session()
        self._rest(0)

    def is_settled(self) -> bool:
        """True if the reader has read all records from before the end of the faults that no power loss took."""
        return all(
            self._positions[place] >= end or self._positions[place] >= self._ledger.end_offset(place)
            for place, end in self._goal.items()
        )

    def on_timeout(self) -> None:
        self._begin_session()
        self._rest(RETRY_MS)

    def _begin_session(self) -> None:
        self._session = 0, 0 if self._has_sessions else -1
        self._told, self._ends = {}, {}

    def _rest(self, delay_ms: int) -> None:
        self._rest_number += 1
        number = self._rest_number
        self.clock.after(delay_ms, lambda: self._fetch() if number == self._rest_number else None)

    def _fetch(self) -> None:
        if self.is_waiting:
            return
        if not self._is_settling and self.random.random() < _BEGIN_ANEW_PROBABILITY:
            self._positions = dict.fromkeys(_PLACES, 0)
        wait_ms = _LAST_WAIT_MS if self._is_settling else self.random.choice(_WAITS_MS)
        session_id, epoch = self._session
        changed = [place for place in _PLACES if self._told.get(place) != self._positions[place]]
        asked_for = changed if epoch > 0 else _PLACES
        request = FetchRequest(
            max_wait_ms=wait_ms,
            min_bytes=1,
            max_bytes=self._limit(500),
            isolation_level=int(self._is_committed),
            session_id=session_id,
            session_epoch=epoch,
            topics=self._topics(asked_for),
            forgotten_topics_data=[],
            rack_id="",
        )
        asked, sent_ms, version = self._ledger.glance(), self.clock.now_ms, self._version

        def on_answer(body: bytes) -> None:
            self._answered(FetchResponse.decode(body, version), asked, sent_ms, wait_ms)

        # A broker whose clock runs at half speed waits twice as long.
        patience_ms = 2 * wait_ms + self.options.request_timeout_ms
        self.request(ApiKey.FETCH, version, "", request, on_answer, timeout_ms=patience_ms)
        self._told.update({place: self._positions[place] for place in asked_for})

    def _limit(self, size_bytes: int) -> int:
        return _NO_LIMIT if self._is_settling else self.random.choice((1, size_bytes, _NO_LIMIT, _NO_LIMIT))

    def _topics(self, places: list[Place]) -> list[FetchRequest.FetchTopic]:
        return [
            FetchRequest.FetchTopic(
                topic=name,
                topic_id=self._promises.topic_id(name) or bytes(16),
                partitions=[
                    FetchRequest.FetchPartition(
                        partition=place.partition,
                        current_leader_epoch=-1,
                        fetch_offset=self._positions[place],
                        last_fetched_epoch=-1,
                        log_start_offset=-1,
                        partition_max_bytes=self._limit(200),
                    )
                    for place in places
                    if place.topic == name
                ],
            )
            for name in RECORD_TOPICS
            if any(place.topic == name for place in places)
        ]

    def _answered(self, response: FetchResponse, asked: Glance, sent_ms: int, wait_ms: int) -> None:
        if response.error_code:
            if response.error_code not in _SESSION_ERRORS | REFUSED:
                raise self.unexpected(response.error_code, "Fetch")
            self._begin_session()
            self._rest(RETRY_MS)
            return
        self._note_session(response.session_id)
        count = errors = 0
        for topic in response.responses:
            name = topic.topic or self._promises.topic_name(topic.topic_id)
            for partition in topic.partitions:
                place = Place(name, partition.partition_index)
                if partition.error_code:
                    errors += 1
                    self._refused(place, partition.error_code)
                    continue
                self._check_ends(place, partition)
                self._ends[place] = partition.high_watermark
                count += self._take(place, partition, asked, sent_ms)
        for place, end_offset in self._ends.items():
            self._ledger.ends_at(place, end_offset, asked)
        waited_ms = self.clock.now_ms - sent_ms
        if not count and not errors and waited_ms < wait_ms:
            raise ViolationError(_L4, f"{self.name} got an empty response after {waited_ms} of {wait_ms} ms")
        self._trace.add("fetched", f"{self.name} {count} {waited_ms}")
        self._rest(RETRY_MS if errors else self.random.randint(1, _LONGEST_REST_MS >> 3 * self._is_settling))

    def _note_session(self, session_id: int) -> None:
        if self._has_sessions and session_id:
            self._session = session_id, self._session[1] + 1

    def _refused(self, place: Place, error: int) -> None:
        if error == Errors.OFFSET_OUT_OF_RANGE:
            # A power loss has taken records. Offsets may have other records now, so all have to be read again.
            self._positions[place] = 0
        elif error not in REFUSED:
            raise self.unexpected(error, f"Fetch of {place}")

    def _check_ends(self, place: Place, partition: FetchResponse.PartitionData) -> None:
        end_offset = partition.last_stable_offset if self._is_committed else partition.high_watermark
        ends = [header.next_offset for _, header in iter_headers(partition.records or b"")]
        if not partition.log_start_offset <= partition.last_stable_offset <= partition.high_watermark or any(
            end > end_offset for end in ends
        ):
            raise ViolationError("L-1 no acknowledged record is lost", f"{self.name}, {place}: {partition}")

    def _take(self, place: Place, partition: FetchResponse.PartitionData, asked: Glance, sent_ms: int) -> int:
        """Reads the batches of a partition like a client library. Returns the number of batches."""
        data = partition.records or b""
        first = position = self._positions[place]
        aborted = sorted((abort.first_offset, abort.producer_id) for abort in partition.aborted_transactions or ())
        skipped: set[int] = set()
        values: dict[int, bytes] = {}
        count = sum(1 for _ in walk_batches(data, verify=True))
        for at, header in iter_headers(data):
            if header.base_offset > position:
                raise ViolationError("L-1 no acknowledged record is lost", f"{place}: nothing at {position}")
            while aborted and aborted[0][0] <= header.last_offset:
                skipped.add(aborted.pop(0)[1])
            entries = decode_entries(data, at)
            if header.is_control:
                if decode_control_key(entries[0][1]) is ControlRecordType.ABORT:
                    skipped.discard(header.producer_id)
            elif not header.is_transactional or header.producer_id not in skipped:
                values.update({offset: value or b"" for offset, _, value in entries if offset >= position})
            position = header.next_offset
        self._ledger.read(place, first, position, values, asked, committed=self._is_committed)
        self._positions[place] = max(position, first)
        if self._is_settling and not self._is_committed:
            self._check_promptness(place, values, sent_ms)
        return count

    def _check_promptness(self, place: Place, values: dict[int, bytes], sent_ms: int) -> None:
        """L-4: without faults a waiting reader gets a record at most `_PROMPTLY_MS` after its acknowledgement."""
        for offset in values:
            acknowledged_ms = self._ledger.acknowledged_ms(place, offset)
            if sent_ms <= acknowledged_ms < self.clock.now_ms - _PROMPTLY_MS:
                late_ms = self.clock.now_ms - acknowledged_ms
                text = f"{self.name} got offset {offset} of {place} {late_ms} ms after it was acknowledged"
                raise ViolationError(_L4, text)
