# SPDX-License-Identifier: Apache-2.0
"""A blocking client for commands that send a few requests: one connection, one request at a time."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import TypeVar

from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import FrameReader, decode_response_header, encode_request
from kcoord_protocol.messages import (
    FetchRequest,
    FetchResponse,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    ListGroupsRequest,
    ListGroupsResponse,
    Message,
    MetadataRequest,
    MetadataResponse,
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetFetchRequest,
    OffsetFetchResponse,
)
from kcoord_protocol.record_batch import iter_headers

R = TypeVar("R", bound=Message)

_MAX_RESPONSE_BYTES = 256 * 1024 * 1024
_RECEIVE_BYTES = 1 << 16
_FETCH_BYTES = 8 * 1024 * 1024
_CLIENT_ID = "kcoord-cli"
# Versions that Kafka 4.x and kcoord support. In all of these versions topics have names, not ids.
_METADATA_VERSION = 12
_FIND_COORDINATOR_VERSION = 4
_LIST_GROUPS_VERSION = 5
_FETCH_VERSION = 12
_OFFSET_FETCH_VERSION = 9
_OFFSET_COMMIT_VERSION = 9


class RequestFailed(Exception):
    """A broker returned an error, or cannot be reached."""


class BlockingClient:
    """One connection to a broker. Use it in a `with` statement."""

    def __init__(self, address: str, timeout_seconds: float) -> None:
        host, _, port = address.rpartition(":")
        if not port.isdigit():
            raise RequestFailed(f"{address} is not HOST:PORT")
        self._frames = FrameReader(_MAX_RESPONSE_BYTES)
        self._correlation_id = 0
        try:
            self._socket = socket.create_connection((host.strip("[]") or "127.0.0.1", int(port)), timeout_seconds)
        except OSError as error:
            raise RequestFailed(f"{address}: {error}") from error

    @classmethod
    def of_first(cls, addresses: str, timeout_seconds: float) -> BlockingClient:
        """Connects to the first broker of a comma-separated list that accepts a connection."""
        failures = []
        for address in filter(None, (part.strip() for part in addresses.split(","))):
            try:
                return cls(address, timeout_seconds)
            except RequestFailed as error:
                failures.append(str(error))
        raise RequestFailed("; ".join(failures) or f"{addresses!r} names no broker")

    def __enter__(self) -> BlockingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def call(self, request: Message, version: int, response_type: type[R]) -> R:
        self._correlation_id += 1
        body = request.encode(version)
        self._socket.sendall(encode_request(request.api_key, version, self._correlation_id, _CLIENT_ID, body))
        frame = self._receive()
        correlation_id, position = decode_response_header(frame, request.api_key, version)
        if correlation_id != self._correlation_id:
            raise RequestFailed(f"{request.message_name}: the response belongs to another request")
        return response_type.decode(frame[position:], version)

    def _receive(self) -> bytes:
        while True:
            data = self._socket.recv(_RECEIVE_BYTES)
            if not data:
                raise RequestFailed("the broker closed the connection")
            frames = self._frames.feed(data)
            if frames:
                return bytes(frames[0])

    # --- requests -----------------------------------------------------------------------------------------------------

    def coordinator_of(self, group_id: str) -> str:
        """Returns HOST:PORT of the group's coordinator."""
        return self.coordinator_node_of(group_id)[1]

    def coordinator_node_of(self, group_id: str) -> tuple[int, str]:
        """Returns node id and HOST:PORT of the group's coordinator."""
        request = FindCoordinatorRequest(coordinator_keys=[group_id])
        coordinator = self.call(request, _FIND_COORDINATOR_VERSION, FindCoordinatorResponse).coordinators[0]
        check(coordinator.error_code, f"the coordinator of {group_id}")
        return coordinator.node_id, f"{coordinator.host}:{coordinator.port}"

    def topics(self, names: list[str]) -> list[MetadataResponse.MetadataResponseTopic]:
        """Returns the topics that exist."""
        requested = [MetadataRequest.MetadataRequestTopic(name=name) for name in names]
        request = MetadataRequest(topics=requested, allow_auto_topic_creation=False)
        response = self.call(request, _METADATA_VERSION, MetadataResponse)
        return [topic for topic in response.topics if topic.error_code == Errors.NONE]

    def group_state(self, group_id: str) -> str | None:
        """Returns the state of a group, or None if the group does not exist. The broker must be its coordinator."""
        response = self.call(ListGroupsRequest(), _LIST_GROUPS_VERSION, ListGroupsResponse)
        check(response.error_code, "the list of groups")
        return next((group.group_state for group in response.groups if group.group_id == group_id), None)

    def committed(self, group_id: str) -> dict[tuple[str, int], int]:
        """Returns all committed offsets of a group, by topic and partition."""
        requested = OffsetFetchRequest.OffsetFetchRequestGroup(group_id=group_id, topics=None, member_id=None)
        group = self.call(OffsetFetchRequest(groups=[requested]), _OFFSET_FETCH_VERSION, OffsetFetchResponse).groups[0]
        check(group.error_code, f"the offsets of {group_id}")
        return {
            (topic.name, partition.partition_index): partition.committed_offset
            for topic in group.topics
            for partition in topic.partitions
            if partition.committed_offset >= 0
        }

    def batches(self, topic: str, partition: int) -> Iterator[bytes]:
        """Yields every batch that a partition has now."""
        offset = 0
        while True:
            fetched = self._fetch(topic, partition, offset)
            if fetched.error_code == Errors.OFFSET_OUT_OF_RANGE and offset < fetched.log_start_offset:
                offset = fetched.log_start_offset
                continue
            check(fetched.error_code, f"{topic}-{partition}")
            data = fetched.records or b""
            for position, header in iter_headers(data):
                if header.next_offset > offset:
                    yield data[position : position + header.size_bytes]
                    offset = header.next_offset
            if offset >= fetched.high_watermark or not data:
                return

    def _fetch(self, topic: str, partition: int, offset: int) -> FetchResponse.PartitionData:
        requested = FetchRequest.FetchPartition(
            partition=partition, fetch_offset=offset, partition_max_bytes=_FETCH_BYTES
        )
        request = FetchRequest(
            max_wait_ms=0,
            min_bytes=0,
            max_bytes=_FETCH_BYTES,
            topics=[FetchRequest.FetchTopic(topic=topic, partitions=[requested])],
        )
        response = self.call(request, _FETCH_VERSION, FetchResponse)
        check(response.error_code, f"reading {topic}-{partition}")
        return response.responses[0].partitions[0]

    def commit(
        self, group_id: str, topics: list[OffsetCommitRequest.OffsetCommitRequestTopic]
    ) -> list[tuple[str, int, Errors]]:
        """Commits as a consumer that is not a member, and returns the error of each partition."""
        request = OffsetCommitRequest(group_id=group_id, generation_id_or_member_epoch=-1, topics=topics)
        response = self.call(request, _OFFSET_COMMIT_VERSION, OffsetCommitResponse)
        return [
            (topic.name, partition.partition_index, Errors(partition.error_code))
            for topic in response.topics
            for partition in topic.partitions
        ]


def check(error_code: int, what: str) -> None:
    if error_code:
        raise RequestFailed(f"{what}: {Errors(error_code).name}")
