# SPDX-License-Identifier: Apache-2.0
"""The handlers of data requests, in every version.

Produce, Fetch, ListOffsets, DeleteRecords, OffsetForLeaderEpoch and InitProducerId.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import threading
from collections.abc import Callable, Coroutine
from itertools import pairwise
from struct import pack
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
from crc32c import crc32c

from kcoord.config.kip1327 import Kip1327Form
from kcoord.runtime.result import CoordinatorResult, OperationContext
from kcoord.server.api.api_table import Client, CloseConnection, RequestContext
from kcoord.server.api.handlers import (
    delete_records,
    fetch,
    init_producer_id,
    list_offsets,
    offset_for_leader_epoch,
    produce,
    write_txn_markers,
)
from kcoord.server.broker import Broker
from kcoord.server.environment import RandomUuids
from kcoord.server.shards.fetch_service import FetchService
from kcoord.storage.checkpoints import LOG_START_OFFSET_FILE, read_offset_checkpoint
from kcoord.storage.memory_file_system import Operation
from kcoord.topics.offset_queries import SEARCHED_AT_ONCE
from kcoord_protocol.batch_header import LOG_APPEND_TIME_BIT
from kcoord_protocol.compression import Compression
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.messages import (
    DeleteRecordsRequest,
    FetchRequest,
    InitProducerIdRequest,
    ListOffsetsRequest,
    Message,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
    ProduceRequest,
    WriteTxnMarkersRequest,
)
from kcoord_protocol.record_batch import frame_batch
from kcoord_protocol.uuid import ZERO_UUID
from tests.unit.topics.helpers import NODE_ID, NOW_MS, TOPIC, Cluster, batch_of, image_of, topic_id_of

TIMEOUT_MS = 1000


class Metadata:
    """Allocates blocks of producer ids after one turn of the event loop."""

    def __init__(self) -> None:
        self.blocks = 0
        self.error: KafkaError | None = None

    def allocate_producer_ids(self, context: OperationContext, broker_id: int) -> CoordinatorResult[SimpleNamespace]:
        self.blocks += 1
        return CoordinatorResult(SimpleNamespace(first_id=1000 * self.blocks, size=3))

    async def call(self, operation: Any, request: Message, context: OperationContext) -> object:
        await asyncio.sleep(0)
        if self.error is not None:
            raise self.error
        return operation(self, context, request).response


RequestMarker = WriteTxnMarkersRequest.WritableTxnMarker


class Server:
    """Calls handlers as a request path does, with encoded and decoded requests."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.metadata = Metadata()
        self.tasks: set[asyncio.Task[Any]] = set()
        self.searches = 0
        fake = SimpleNamespace(
            topics=cluster.store,
            fetches=FetchService(cluster.store.fetches, lambda: cluster.now_ms, RandomUuids()),
            node_id=NODE_ID,
            metadata=self.metadata,
            spawn=self.spawn,
            found_in_thread=self.found_in_thread,
            endpoints={"PLAINTEXT": SimpleNamespace(host="localhost", port=9092)},
            config=cluster.config,
            image=cluster.image,
            quotas=None,
        )
        self.broker = cast("Broker", fake)

    def spawn(self, coroutine: Coroutine[object, object, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self.tasks.add(task)
        return task

    async def found_in_thread(self, find: Callable[[], Any]) -> Any:
        self.searches += 1
        return await asyncio.to_thread(find)

    async def call(self, module: ModuleType, request: Message, version: int) -> Any:
        received = type(request).decode(request.encode(version), version)
        client = Client(Kip1327Form.OFF, "PLAINTEXT", "192.0.2.1")
        context = RequestContext(module.API_KEY, version, 1, "client", client, self.cluster.now_ms, rights=None)
        try:
            response = module.handle(self.broker, context, received)
            if asyncio.isfuture(response):
                response = await response
        except KafkaError as error:
            response = module.error_response(received, error, version)
        if response is not None and not isinstance(response, CloseConnection):
            # Encodes and decodes the response, so that the test sees what a client sees.
            response = type(response).decode(response.encode(version), version)
        return response


@pytest.fixture
async def server() -> Server:
    return Server(Cluster(image_of({TOPIC: 2, "__consumer_offsets": 1})))


def produce_request(
    batch: bytes | None, *, acks: int = -1, topic: str = TOPIC, partition: int = 0, version: int = 13
) -> ProduceRequest:
    data = ProduceRequest.TopicProduceData(
        name=topic if version < 13 else "",
        topic_id=topic_id_of(topic) if version >= 13 else ZERO_UUID,
        partition_data=[ProduceRequest.PartitionProduceData(index=partition, records=batch)],
    )
    return ProduceRequest(acks=acks, timeout_ms=TIMEOUT_MS, topic_data=[data])


async def produced(server: Server, batch: bytes | None, version: int = 13, **named: Any) -> Any:
    response = await server.call(produce, produce_request(batch, version=version, **named), version)
    return response.responses[0].partition_responses[0]


# --- Produce ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(3, 14))
async def test_produce_in_every_version(server: Server, version: int) -> None:
    result = await produced(server, batch_of("a"), version)
    assert (result.index, result.error_code, result.base_offset) == (0, 0, 0)
    assert result.log_append_time_ms == -1
    assert result.log_start_offset == (0 if version >= 5 else -1)
    failed = await produced(server, batch_of("a"), version, partition=7)
    assert (failed.error_code, failed.base_offset) == (Errors.UNKNOWN_TOPIC_OR_PARTITION, -1)


async def test_produce_with_acks(server: Server) -> None:
    assert (await produced(server, batch_of("a"), acks=1)).base_offset == 0
    assert await server.call(produce, produce_request(batch_of("b"), acks=0), 13) is None
    refused = await server.call(produce, produce_request(batch_of("b"), acks=0, partition=99), 13)
    assert isinstance(refused, CloseConnection), "the client notices the end of the connection"
    assert (await produced(server, batch_of("c"))).base_offset == 2
    assert (await produced(server, batch_of("d"), acks=2)).error_code == Errors.INVALID_REQUIRED_ACKS
    assert (await produced(server, b"", acks=2)).error_code == Errors.INVALID_RECORD
    failed = produce.error_response(produce_request(None, acks=0), KafkaError(Errors.UNKNOWN_SERVER_ERROR), 13)
    assert isinstance(failed, CloseConnection)


async def test_a_failed_produce_keeps_neither_the_batch_nor_a_file(
    server: Server, caplog: pytest.LogCaptureFixture
) -> None:
    """A deleted file takes its space on a full disk as long as it is open."""
    # pytest would keep the error in a record of the log.
    caplog.set_level(logging.CRITICAL)
    gc.collect()
    gc.disable()
    try:
        server.cluster.fs.fault = lambda operation: (
            OSError(errno.ENOSPC, "no space") if operation.kind == "write" else None
        )
        assert (await produced(server, batch_of("a"))).error_code == Errors.KAFKA_STORAGE_ERROR
        kept = [error for error in gc.get_objects() if isinstance(error, KafkaError)]
        assert Errors.KAFKA_STORAGE_ERROR not in [error.error for error in kept]
    finally:
        gc.enable()


async def test_produce_errors(server: Server) -> None:
    assert (await produced(server, batch_of("a"), topic="absent")).error_code == Errors.UNKNOWN_TOPIC_ID
    unknown = await produced(server, batch_of("a"), 12, topic="absent")
    assert unknown.error_code == Errors.UNKNOWN_TOPIC_OR_PARTITION
    internal = await produced(server, batch_of("a"), topic="__consumer_offsets")
    assert internal.error_code == Errors.INVALID_TOPIC_EXCEPTION
    assert (await produced(server, None)).error_code == Errors.INVALID_RECORD


@pytest.mark.parametrize("version", [12, 13])
async def test_produce_with_a_repeated_partition_appends_its_last_records(server: Server, version: int) -> None:
    """As Kafka 4.3.1, which appends the last batch and answers the partition once."""
    request = produce_request(batch_of("a", "b"), version=version)
    again = produce_request(batch_of("c"), version=version)
    request.topic_data[0].partition_data.append(request.topic_data[0].partition_data[0])
    request.topic_data += again.topic_data
    response = await server.call(produce, request, version)
    (topic,) = response.responses
    assert [(partition.index, partition.error_code) for partition in topic.partition_responses] == [(0, 0)]
    (end,) = await listed(server, list_request(-1))
    assert end.offset == 1


def mixed_request(version: int, batches: list[bytes | None], transactional_id: str | None) -> ProduceRequest:
    """Returns a request with the batches for as many partitions, and one for a topic that does not exist."""
    request = produce_request(batches[0], version=version)
    request.transactional_id = transactional_id
    request.topic_data[0].partition_data += [
        ProduceRequest.PartitionProduceData(index=index, records=batch) for index, batch in enumerate(batches) if index
    ]
    request.topic_data += produce_request(batch_of("x"), topic="absent", version=version).topic_data
    return request


async def mixed(
    server: Server, version: int, batches: list[bytes | None], transactional_id: str | None
) -> list[list[tuple[int, int]]]:
    """Returns (error, base offset) of each partition of a mixed request, by topic."""
    response = await server.call(produce, mixed_request(version, batches, transactional_id), version)
    return [
        [(partition.error_code, partition.base_offset) for partition in topic.partition_responses]
        for topic in response.responses
    ]


@pytest.mark.parametrize("producer", [(-1, -1, -1), (-2, 0, 0), (5, 0, 0)])
@pytest.mark.parametrize("version", [3, 11, 12, 13])
async def test_a_transactional_batch_needs_a_transactional_id(
    server: Server, version: int, producer: tuple[int, int, int]
) -> None:
    """Kafka 4.3.1 and 4.4.0 reject all partitions of the request."""
    batch = batch_of("a", producer=producer, is_transactional=True)
    refused = [(Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED, -1)]
    assert await mixed(server, version, [batch_of("b"), batch], None) == [refused * 2, refused]
    assert [end.offset for end in await listed(server, list_request(-1, -1))] == [0, 0]
    request = mixed_request(version, [batch_of("b"), batch], None)
    request.acks = 0
    assert isinstance(await server.call(produce, request, version), CloseConnection)
    alone = await produced(server, batch, version, topic="absent")
    assert alone.error_code == Errors.TRANSACTIONAL_ID_AUTHORIZATION_FAILED


@pytest.mark.parametrize("version", [3, 11, 12, 13])
async def test_a_batch_that_is_cut_off_is_not_transactional(server: Server, version: int) -> None:
    batch = batch_of("a", producer=(5, 0, 0), is_transactional=True)[:-1]
    assert (await produced(server, batch, version)).error_code == Errors.INVALID_RECORD


@pytest.mark.parametrize("producer", [(-1, -1, -1), (-2, 0, 0)])
@pytest.mark.parametrize("version", [3, 11, 12, 13])
async def test_a_transactional_batch_without_a_producer_is_stored(
    server: Server, version: int, producer: tuple[int, int, int]
) -> None:
    """Kafka 4.3.1 and 4.4.0 store it, and it opens no transaction."""
    batch = batch_of("a", producer=producer, is_transactional=True)
    absent = Errors.UNKNOWN_TOPIC_OR_PARTITION if version < 13 else Errors.UNKNOWN_TOPIC_ID
    assert await mixed(server, version, [batch, batch_of("b")], "tx") == [[(0, 0), (0, 0)], [(absent, -1)]]
    request = fetch_request(18)
    request.isolation_level = 1
    data = (await server.call(fetch, request, 18)).responses[0].partitions[0]
    assert (data.records[16:], data.last_stable_offset, data.aborted_transactions) == (batch[16:], 1, [])


@pytest.mark.parametrize("other", [(6, 0, 0), (5, 1, 0)])
@pytest.mark.parametrize("version", [3, 11, 12, 13])
async def test_a_request_has_the_transaction_of_one_producer(
    server: Server, version: int, other: tuple[int, int, int]
) -> None:
    """Kafka 4.3.1 and 4.4.0 reject all partitions of the request, also those that are not transactional."""
    batches = [batch_of("a", producer=producer, is_transactional=True) for producer in ((5, 0, 0), other)]
    server.cluster.update(image_of({TOPIC: 3}))
    refused = [(Errors.INVALID_PRODUCER_ID_MAPPING, -1)]
    assert await mixed(server, version, [*batches, batch_of("b")], "tx") == [refused * 3, refused]
    assert [end.offset for end in await listed(server, list_request(-1, -1, -1))] == [0, 0, 0]


async def test_produce_names_the_records_at_fault(server: Server) -> None:
    server.cluster.update(image_of({TOPIC: 1}, configs={TOPIC: {"cleanup.policy": "compact"}}))
    result = await produced(server, batch_of("a", "b", keys=False), 8)
    assert result.error_code == Errors.INVALID_RECORD
    assert [error.batch_index for error in result.record_errors] == [0, 1]
    assert result.record_errors[0].batch_index_error_message
    assert result.error_message


async def test_produce_points_to_the_leader(server: Server) -> None:
    server.cluster.update(image_of({TOPIC: 1}, leader=NODE_ID + 1, leader_epoch=4))
    result = await produced(server, batch_of("a"))
    assert result.error_code == Errors.NOT_LEADER_OR_FOLLOWER
    assert (result.current_leader.leader_id, result.current_leader.leader_epoch) == (NODE_ID + 1, 4)
    assert (await produced(server, batch_of("a"), 9)).error_code == Errors.NOT_LEADER_OR_FOLLOWER


async def test_out_of_order_batches_keep_the_start_offset(server: Server) -> None:
    await produced(server, batch_of("a", producer=(5, 0, 0)))
    result = await produced(server, batch_of("a", producer=(5, 0, 9)))
    assert (result.error_code, result.log_start_offset) == (Errors.OUT_OF_ORDER_SEQUENCE_NUMBER, 0)


@pytest.mark.parametrize("records", [None, b"", batch_of("a")[:30], batch_of("a") * 2])
async def test_records_that_are_no_batch_have_no_start_offset(server: Server, records: bytes | None) -> None:
    """As in Kafka 4.3.1, which rejects them before it looks at the log."""
    result = await produced(server, records)
    assert (result.error_code, result.log_start_offset) == (Errors.INVALID_RECORD, -1)


# --- Fetch ------------------------------------------------------------------------------------------------------------


def fetch_request(version: int, offset: int = 0, *, wait_ms: int = 0, leader_epoch: int = -1) -> FetchRequest:
    partition = FetchRequest.FetchPartition(
        partition=0, fetch_offset=offset, partition_max_bytes=1000, current_leader_epoch=leader_epoch
    )
    topic = FetchRequest.FetchTopic(topic=TOPIC, topic_id=topic_id_of(TOPIC), partitions=[partition])
    return FetchRequest(max_wait_ms=wait_ms, min_bytes=1, session_epoch=0 if version >= 7 else -1, topics=[topic])


@pytest.mark.parametrize("version", range(4, 19))
async def test_fetch_in_every_version(server: Server, version: int) -> None:
    server.cluster.append(batch_of("a"))
    response = await server.call(fetch, fetch_request(version), version)
    assert response.responses[0].partitions[0].high_watermark == 1
    assert (response.session_id > 0) == (version >= 7)
    failed = fetch.error_response(fetch_request(version), KafkaError(Errors.UNKNOWN_SERVER_ERROR), version)
    assert failed.encode(version)


async def test_fetch_is_completed_by_a_produce(server: Server) -> None:
    waiting = asyncio.ensure_future(server.call(fetch, fetch_request(18, wait_ms=60_000), 18))
    await asyncio.sleep(0)
    assert not waiting.done()
    await produced(server, batch_of("a"))
    response = await asyncio.wait_for(waiting, 5)
    assert response.responses[0].partitions[0].records


async def test_fetch_points_to_the_leader(server: Server) -> None:
    server.cluster.update(image_of({TOPIC: 1}, leader_epoch=4))
    response = await server.call(fetch, fetch_request(16, leader_epoch=3), 16)
    data = response.responses[0].partitions[0]
    assert (data.error_code, data.current_leader.leader_epoch) == (Errors.FENCED_LEADER_EPOCH, 4)
    assert [(node.node_id, node.host, node.port) for node in response.node_endpoints] == [(NODE_ID, "localhost", 9092)]


# --- ListOffsets ------------------------------------------------------------------------------------------------------


def list_request(*timestamps: int, version: int = 11, topic: str = TOPIC, leader_epoch: int = -1) -> ListOffsetsRequest:
    partitions = [
        ListOffsetsRequest.ListOffsetsPartition(
            partition_index=index, timestamp=timestamp, current_leader_epoch=leader_epoch
        )
        for index, timestamp in enumerate(timestamps)
    ]
    return ListOffsetsRequest(topics=[ListOffsetsRequest.ListOffsetsTopic(name=topic, partitions=partitions)])


async def listed(server: Server, request: ListOffsetsRequest, version: int = 11) -> list[Any]:
    response = await server.call(list_offsets, request, version)
    return list(response.topics[0].partitions)


@pytest.mark.parametrize("version", range(1, 12))
async def test_list_offsets_in_every_version(server: Server, version: int) -> None:
    server.cluster.append(batch_of("a", "b"))
    latest, by_time = await listed(server, list_request(-1, 0), version)
    assert (latest.error_code, latest.offset, latest.timestamp) == (0, 2, -1)
    assert (by_time.error_code, by_time.offset) == (0, -1)
    since = {-1: 1, -2: 1, -3: 7, -4: 8, -5: 9, -6: 11}
    for timestamp in range(-7, 0):
        result = (await listed(server, list_request(timestamp), version))[0]
        supported = version >= since.get(timestamp, 99)
        assert result.error_code == (Errors.NONE if supported else Errors.UNSUPPORTED_VERSION)


@pytest.mark.parametrize("level", [-1, 2, 127])
async def test_unknown_isolation_levels(server: Server, level: int) -> None:
    """As in Kafka, a Fetch fails only if there is something to read."""
    await produced(server, batch_of("a"))
    for version in (6, 12, 13):
        request = fetch_request(version)
        request.isolation_level = level
        with pytest.raises(KafkaError, match="isolation level") as failure:
            server.broker.fetches.fetch(type(request).decode(request.encode(version), version), version)
        assert failure.value.error is Errors.UNKNOWN_SERVER_ERROR
    absent = ListOffsetsRequest(isolation_level=level)
    with pytest.raises(KafkaError, match="isolation level"):
        list_offsets.handle(server.broker, cast("RequestContext", None), absent)


@pytest.mark.parametrize("version", [6, 12, 13])
async def test_the_field_for_the_error_of_a_whole_fetch_depends_on_the_version(server: Server, version: int) -> None:
    failed = fetch.error_response(fetch_request(version), KafkaError(Errors.UNKNOWN_SERVER_ERROR), version)
    assert failed.error_code == (Errors.NONE if version < 7 else Errors.UNKNOWN_SERVER_ERROR)
    errors = [partition.error_code for topic in failed.responses for partition in topic.partitions]
    assert errors == ([Errors.UNKNOWN_SERVER_ERROR] if version < 13 else [])
    lists = [partition.aborted_transactions for topic in failed.responses for partition in topic.partitions]
    assert all(aborted == [] for aborted in lists), "observed in Kafka 4.3.1, for an unknown isolation level"


@pytest.mark.parametrize("timestamp", [NOW_MS + SEARCHED_AT_ONCE, -3])
async def test_a_thread_searches_batches_of_very_many_records(server: Server, timestamp: int) -> None:
    """A few KB may expand to millions of records. The event loop would not serve other clients for seconds."""
    many = SEARCHED_AT_ONCE + 1
    server.cluster.append(batch_of(*[""] * many, compression=Compression.ZSTD))
    few = [(await listed(server, list_request(-1)))[0].offset]
    server.cluster.append(batch_of("a", timestamp_ms=NOW_MS + 2 * many), partition=1)
    assert (few, server.searches) == ([many], 0)
    results = await listed(server, list_request(timestamp, timestamp))
    assert [(result.error_code, result.timestamp, result.offset, result.leader_epoch) for result in results] == [
        (0, NOW_MS + many - 1, many - 1, 0),
        (0, NOW_MS + 2 * many, 0, 0),
    ]
    assert server.searches == 1


async def test_a_thread_searches_batches_whose_records_are_older_than_their_headers_say(server: Server) -> None:
    """A producer may set the largest timestamp of a header. The search may then go through the whole log."""
    claiming = bytearray(batch_of("a", "b", timestamp_ms=NOW_MS))
    claiming[21:23] = pack(">h", LOG_APPEND_TIME_BIT)
    claiming[35:43] = pack(">q", NOW_MS + 100)
    claiming[17:21] = pack(">I", crc32c(claiming[21:]))
    for _ in range(3):
        server.cluster.append(bytes(claiming))
    server.cluster.append(batch_of("c", timestamp_ms=NOW_MS + 100))
    (result,) = await listed(server, list_request(NOW_MS + 50))
    assert (result.error_code, result.timestamp, result.offset, server.searches) == (0, NOW_MS + 100, 6, 1)


async def test_a_search_in_a_thread_may_fail(server: Server) -> None:
    log = server.cluster.store.partition(TOPIC, 0).open(NOW_MS).log
    header = pack(">hiqqqhii", 0, SEARCHED_AT_ONCE, NOW_MS, NOW_MS, -1, -1, -1, SEARCHED_AT_ONCE + 1)
    log.append(frame_batch(0, 0, header + b"no records"), now_ms=NOW_MS)
    (result,) = await listed(server, list_request(NOW_MS))
    assert (result.error_code, result.offset, server.searches) == (Errors.KAFKA_STORAGE_ERROR, -1, 1)


async def test_list_offsets_errors(server: Server) -> None:
    request = list_request(-1)
    request.topics[0].partitions *= 2
    request.topics *= 2
    assert [result.error_code for result in await listed(server, request)] == [Errors.INVALID_REQUEST]
    absent = (await listed(server, list_request(-1, topic="absent")))[0]
    assert (absent.error_code, absent.offset, absent.timestamp) == (Errors.UNKNOWN_TOPIC_OR_PARTITION, -1, -1)
    ahead = (await listed(server, list_request(-1, leader_epoch=8)))[0]
    assert ahead.error_code == Errors.UNKNOWN_LEADER_EPOCH


# --- DeleteRecords, OffsetForLeaderEpoch ------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(3))
async def test_delete_records_in_every_version(server: Server, version: int) -> None:
    server.cluster.append(batch_of("a", "b"))
    partitions = [
        DeleteRecordsRequest.DeleteRecordsPartition(partition_index=index, offset=offset)
        for index, offset in ((0, 1), (1, 5), (9, 0))
    ]
    request = DeleteRecordsRequest(
        topics=[DeleteRecordsRequest.DeleteRecordsTopic(name=TOPIC, partitions=partitions)], timeout_ms=TIMEOUT_MS
    )
    response = await server.call(delete_records, request, version)
    results = [(result.low_watermark, result.error_code) for result in response.topics[0].partitions]
    assert results == [(1, 0), (-1, Errors.OFFSET_OUT_OF_RANGE), (-1, Errors.UNKNOWN_TOPIC_OR_PARTITION)]


async def test_delete_records_with_a_repeated_partition_uses_its_last_offset(server: Server) -> None:
    server.cluster.append(batch_of("a", "b"))
    partition = DeleteRecordsRequest.DeleteRecordsPartition
    topics = [
        DeleteRecordsRequest.DeleteRecordsTopic(name=TOPIC, partitions=[partition(partition_index=0, offset=offset)])
        for offset in (2, 9, 1)
    ]
    response = await server.call(delete_records, DeleteRecordsRequest(topics=topics, timeout_ms=TIMEOUT_MS), 2)
    (topic,) = response.topics
    assert [(result.low_watermark, result.error_code) for result in topic.partitions] == [(1, 0)]


async def test_only_delete_records_waits_for_the_disk(server: Server) -> None:
    server.cluster.append(batch_of("a", "b"))
    began, may_go_on = threading.Event(), threading.Event()
    threads: list[int] = []

    def slow_disk(operation: Operation) -> None:
        if operation.kind == "datasync" and LOG_START_OFFSET_FILE in operation.path:
            threads.append(threading.get_ident())
            began.set()
            assert may_go_on.wait(30) or threads == [threading.get_ident()]

    server.cluster.fs.fault = slow_disk
    partition = DeleteRecordsRequest.DeleteRecordsPartition(partition_index=0, offset=1)
    topic = DeleteRecordsRequest.DeleteRecordsTopic(name=TOPIC, partitions=[partition])
    deleting = asyncio.ensure_future(server.call(delete_records, DeleteRecordsRequest(topics=[topic]), 2))
    while not began.is_set():
        await asyncio.sleep(0)
    assert threads != [threading.get_ident()]
    try:
        assert (await produced(server, batch_of("c"))).error_code == 0
        assert not deleting.done()
    finally:
        may_go_on.set()
    assert (await deleting).topics[0].partitions[0].low_watermark == 1
    server.cluster.fs.crash(lambda kind, path, pending: 0)
    assert read_offset_checkpoint(server.cluster.fs, f"data/{LOG_START_OFFSET_FILE}") == {(TOPIC, 0): 1}


async def test_offset_for_leader_epoch_of_many_partitions_takes_several_turns(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offset_for_leader_epoch, "PARTITIONS_PER_TURN", 3)
    looked_up: list[str] = []

    def look_up(broker: object, context: object, topic: str, partition: object) -> object:
        looked_up.append(topic)
        return OffsetForLeaderEpochResponse.EpochEndOffset()

    monkeypatch.setattr(offset_for_leader_epoch, "_look_up", look_up)
    partitions = [OffsetForLeaderEpochRequest.OffsetForLeaderPartition(partition=index) for index in range(4)]
    topics = [OffsetForLeaderEpochRequest.OffsetForLeaderTopic(topic=name, partitions=partitions) for name in "ab"]
    answered = asyncio.ensure_future(
        server.call(offset_for_leader_epoch, OffsetForLeaderEpochRequest(topics=topics), 4)
    )
    counts = [0]
    while not answered.done():
        await asyncio.sleep(0)
        counts.append(len(looked_up))
    assert counts[-1] == 8
    assert max(after - before for before, after in pairwise(counts)) == 3
    assert [(topic.topic, len(topic.partitions)) for topic in answered.result().topics] == [("a", 4), ("b", 4)]


async def test_many_transaction_markers_take_several_turns(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_txn_markers, "MARKERS_AT_A_TIME", 3)
    written: list[tuple[int, str, int]] = []
    later: asyncio.Future[Errors] = asyncio.get_running_loop().create_future()

    def write(broker: object, context: object, marker: RequestMarker, topic: str, index: int) -> object:
        written.append((marker.producer_id, topic, index))
        return later if index == 2 else Errors.NONE

    monkeypatch.setattr(write_txn_markers, "_write", write)
    topics = [
        WriteTxnMarkersRequest.WritableTxnMarkerTopic(name=name, partition_indexes=indexes)
        for name, indexes in (("a", [0, 1]), ("b", [2, 3]), ("none", []), ("a", [4]))
    ]
    markers = [RequestMarker(producer_id=producer_id, topics=topics) for producer_id in (7, 8)]
    request = WriteTxnMarkersRequest(markers=markers)
    answered = asyncio.ensure_future(server.call(write_txn_markers, request, 1))
    counts = [0]
    for _ in range(10):
        await asyncio.sleep(0)
        counts.append(len(written))
    assert counts[-1] == 10 and not answered.done()
    assert max(after - before for before, after in pairwise(counts)) == 3
    later.set_result(Errors.INVALID_PRODUCER_EPOCH)
    for producer_id, result in zip((7, 8), (await answered).markers, strict=True):
        assert result.producer_id == producer_id
        codes = {topic.name: [(p.partition_index, p.error_code) for p in topic.partitions] for topic in result.topics}
        assert codes == {"a": [(0, 0), (1, 0), (4, 0)], "b": [(2, Errors.INVALID_PRODUCER_EPOCH), (3, 0)]}


@pytest.mark.parametrize("version", range(2, 5))
async def test_offset_for_leader_epoch_in_every_version(server: Server, version: int) -> None:
    server.cluster.append(batch_of("a", "b"))
    partitions = [
        OffsetForLeaderEpochRequest.OffsetForLeaderPartition(
            partition=index, leader_epoch=epoch, current_leader_epoch=current
        )
        for index, epoch, current in ((0, 0, 0), (0, 7, -1), (9, 0, -1), (0, 0, 5))
    ]
    topic = OffsetForLeaderEpochRequest.OffsetForLeaderTopic(topic=TOPIC, partitions=partitions)
    response = await server.call(offset_for_leader_epoch, OffsetForLeaderEpochRequest(topics=[topic]), version)
    results = response.topics[0].partitions
    assert [(result.error_code, result.leader_epoch, result.end_offset) for result in results] == [
        (0, 0, 2),
        (0, -1, -1),
        (Errors.UNKNOWN_TOPIC_OR_PARTITION, -1, -1),
        (Errors.UNKNOWN_LEADER_EPOCH, -1, -1),
    ]


# --- InitProducerId ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", range(6))
async def test_producer_ids_in_every_version(server: Server, version: int) -> None:
    response = await server.call(init_producer_id, InitProducerIdRequest(transactional_id=None), version)
    assert (response.error_code, response.producer_id, response.producer_epoch) == (0, 1000, 0)


async def test_producer_ids_share_blocks(server: Server) -> None:
    requests = [server.call(init_producer_id, InitProducerIdRequest(transactional_id=None), 5) for _ in range(5)]
    responses = await asyncio.gather(*requests)
    assert sorted(response.producer_id for response in responses) == [1000, 1001, 1002, 2000, 2001]
    assert server.metadata.blocks == 2


async def test_without_a_block_there_is_no_producer_id(server: Server) -> None:
    server.metadata.error = KafkaError(Errors.COORDINATOR_LOAD_IN_PROGRESS)
    response = await server.call(init_producer_id, InitProducerIdRequest(transactional_id=None), 5)
    assert (response.error_code, response.producer_id) == (Errors.COORDINATOR_LOAD_IN_PROGRESS, -1)
    server.metadata.error = None
    assert (await server.call(init_producer_id, InitProducerIdRequest(transactional_id=None), 5)).producer_id == 1000


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        (InitProducerIdRequest(transactional_id=None, producer_id=5), Errors.INVALID_REQUEST),
        (InitProducerIdRequest(transactional_id=None, producer_epoch=5), Errors.INVALID_REQUEST),
    ],
)
async def test_a_request_with_only_an_id_or_only_an_epoch_is_rejected(
    server: Server, request_: InitProducerIdRequest, error: Errors
) -> None:
    response = await server.call(init_producer_id, request_, 5)
    assert (response.error_code, response.producer_id, response.producer_epoch) == (error, -1, -1)


async def test_error_responses_name_every_partition(server: Server) -> None:
    error = KafkaError(Errors.UNKNOWN_SERVER_ERROR)
    for module, request in (
        (produce, produce_request(None)),
        (list_offsets, list_request(-1, -1)),
        (delete_records, DeleteRecordsRequest()),
        (offset_for_leader_epoch, OffsetForLeaderEpochRequest()),
    ):
        response = cast("Any", module).error_response(request, error, module.VERSIONS.stop - 1)
        assert response.encode(module.VERSIONS.stop - 1)
    assert server.cluster.now_ms == NOW_MS
