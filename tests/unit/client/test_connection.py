# SPDX-License-Identifier: Apache-2.0
"""Connections and their use by the cluster: pipelining, versions, timeouts, damage, retries, coordinators."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kcoord.client.api_versions import ApiVersions
from kcoord.client.cluster import Cluster, CoordinatorType, Purpose
from kcoord.client.config import AdminConfig
from kcoord.client.connection import Connection, open_connection
from kcoord.client.errors import (
    DisconnectException,
    IllegalStateException,
    TimeoutException,
    UnsupportedVersionException,
)
from kcoord.client.security import RequestSender, Security
from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors, KafkaError
from kcoord_protocol.message import Message
from kcoord_protocol.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    DeleteGroupsRequest,
    DeleteGroupsResponse,
    FindCoordinatorResponse,
    HeartbeatRequest,
    HeartbeatResponse,
    MetadataRequest,
    MetadataResponse,
    ProduceRequest,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)
from tests.unit.client.fake_broker import Answer, FakeBroker
from tests.unit.client.virtual_loop import now_ms, running_loop


async def connect(broker: FakeBroker, *, timeout_ms: int = 2000, security: Security | None = None) -> Connection:
    return await open_connection(
        "127.0.0.1",
        broker.port,
        client_id="test",
        request_timeout_ms=timeout_ms,
        connect_timeout_ms=2000,
        max_frame_bytes=1 << 20,
        security=security,
    )


@asynccontextmanager
async def cluster_of(broker: FakeBroker, **options: int) -> AsyncIterator[Cluster]:
    config = AdminConfig(
        bootstrap_servers=broker.address,
        retry_backoff_ms=1,
        reconnect_backoff_ms=1,
        **options,  # type: ignore[arg-type]
    )
    cluster = Cluster(config)
    try:
        await cluster.start(cluster.deadline(5000))
        yield cluster
    finally:
        await cluster.close()


class TestVersions:
    def test_the_highest_common_version(self) -> None:
        versions = ApiVersions({ApiKey.METADATA: (4, 9)})
        assert versions.choose(MetadataRequest) == 9
        assert versions.choose(MetadataRequest, highest=7) == 7
        assert versions.offers(ApiKey.METADATA, 9) and not versions.offers(ApiKey.METADATA, 10)
        for lowest, highest in ((10, None), (0, 3)):
            with pytest.raises(UnsupportedVersionException, match="MetadataRequest"):
                versions.choose(MetadataRequest, lowest, highest)
        with pytest.raises(UnsupportedVersionException, match="does not support ProduceRequest"):
            versions.choose(ProduceRequest)

    async def test_the_client_uses_its_highest_version_with_a_newer_broker(self) -> None:
        async with FakeBroker(metadata=(0, 99)) as broker:
            connection = await connect(broker)
            await connection.call(MetadataRequest(topics=[]), MetadataResponse)
            assert broker.requests[-1][1] == MetadataRequest.valid_versions.stop - 1
            await connection.close()

    async def test_an_older_broker_returns_its_version_of_api_versions(self) -> None:
        def old(request: Message, version: int) -> Answer:
            error = Errors.UNSUPPORTED_VERSION if version > 1 else Errors.NONE
            return ApiVersionsResponse(error_code=error, api_keys=broker.api_versions())

        async with FakeBroker({ApiKey.API_VERSIONS: old}, api_versions=(0, 1)) as broker:
            connection = await connect(broker)
            assert [version for _, version, _ in broker.requests] == [5, 1]
            assert connection.versions.offers(ApiKey.METADATA)
            await connection.close()

    @pytest.mark.parametrize(
        ("offered", "asked"),
        [
            ([(ApiKey.METADATA, 9), (ApiKey.API_VERSIONS, 2)], [5, 2, 1, 0]),
            ([(ApiKey.API_VERSIONS, 0)], [5, 0]),
            ([(ApiKey.METADATA, 9)], [5, 0]),
            ([], [5, 0]),
            ([(ApiKey.API_VERSIONS, 99)], [5, 4, 3, 2, 1, 0]),
        ],
    )
    async def test_lower_versions_of_api_versions_are_tried_down_to_0(
        self, offered: list[tuple[ApiKey, int]], asked: list[int]
    ) -> None:
        api = ApiVersionsResponse.ApiVersion
        answer = ApiVersionsResponse(
            error_code=Errors.UNSUPPORTED_VERSION,
            api_keys=[api(api_key=key, min_version=0, max_version=highest) for key, highest in offered],
        )
        async with FakeBroker({ApiKey.API_VERSIONS: lambda *_: answer}) as broker:
            with pytest.raises(KafkaError, match=r"UNSUPPORTED_VERSION.*rejected ApiVersions"):
                await connect(broker)
            assert broker.versions_of(ApiKey.API_VERSIONS) == asked
            assert running_loop().connections == set()


class TestConnection:
    async def test_requests_have_correlation_ids(self) -> None:
        async with FakeBroker() as broker:
            connection = await connect(broker)
            for _ in range(3):
                await connection.call(MetadataRequest(topics=[]), MetadataResponse)
            assert broker.correlation_ids == [0, 1, 2, 3]
            await connection.close()
            assert running_loop().connections == set()

    async def test_requests_wait_while_the_transport_is_full(self) -> None:
        async with FakeBroker(
            {ApiKey.HEARTBEAT: lambda *_: HeartbeatResponse(), ApiKey.PRODUCE: lambda *_: None}
        ) as broker:
            connection = await connect(broker)
            connection.pause_writing()
            calls = [
                asyncio.create_task(connection.call(HeartbeatRequest(), HeartbeatResponse)),
                asyncio.create_task(connection.send_unanswered(ProduceRequest(acks=0, timeout_ms=1))),
                asyncio.create_task(connection.negotiate()),
            ]
            await asyncio.sleep(1)
            assert len(broker.requests) == 1
            connection.resume_writing()
            await asyncio.gather(*calls)
            await asyncio.sleep(1)
            assert [key for key, _, _ in broker.requests[1:]] == [ApiKey.HEARTBEAT, ApiKey.PRODUCE, ApiKey.API_VERSIONS]
            await connection.close()

    async def test_a_request_without_a_response_waits_up_to_the_request_timeout(self) -> None:
        """A broker that hangs reads nothing, and no response is late."""
        async with FakeBroker({ApiKey.PRODUCE: lambda *_: None}) as broker:
            connection = await connect(broker, timeout_ms=300)
            connection.pause_writing()
            before = now_ms()
            with pytest.raises(TimeoutException, match=r"127\.0\.0\.1:\d+ did not read requests for 300 ms"):
                await connection.send_unanswered(ProduceRequest(acks=0, timeout_ms=1))
            assert now_ms() - before == 300
            assert connection.is_closed

    async def test_a_call_that_waits_for_a_full_transport_fails_with_the_connection(self) -> None:
        async with FakeBroker({ApiKey.HEARTBEAT: lambda *_: HeartbeatResponse()}) as broker:
            connection = await connect(broker)
            connection.pause_writing()
            call = asyncio.create_task(connection.call(HeartbeatRequest(), HeartbeatResponse))
            await asyncio.sleep(1)
            broker.hang_up()
            with pytest.raises(DisconnectException, match="closed the connection: connection reset by peer"):
                await call

    async def test_a_response_to_no_request_closes_the_connection(self) -> None:
        async with FakeBroker({ApiKey.HEARTBEAT: lambda *_: HeartbeatResponse()}) as broker:
            connection = await connect(broker)
            broker.connections[0].write(b"\x00\x00\x00\x04\x00\x00\x00\x01")
            await asyncio.sleep(1)
            with pytest.raises(DisconnectException, match="sent a response to no request"):
                await connection.call(HeartbeatRequest(), HeartbeatResponse)

    @pytest.mark.parametrize(("timeout_ms", "waited_ms"), [(None, 2000), (700, 700)])
    async def test_a_late_response_times_out(self, timeout_ms: int | None, waited_ms: int) -> None:
        async with FakeBroker({ApiKey.HEARTBEAT: lambda *_: None}) as broker:
            connection = await connect(broker, timeout_ms=2000)
            before = now_ms()
            with pytest.raises(TimeoutException, match=f"did not answer HeartbeatRequest within {waited_ms} ms"):
                await connection.call(HeartbeatRequest(), HeartbeatResponse, timeout_ms=timeout_ms)
            assert now_ms() - before == waited_ms
            await connection.close()

    async def test_connection_setup_and_negotiation_time_out(self) -> None:
        async with FakeBroker({ApiKey.API_VERSIONS: lambda *_: None}) as broker:
            before = now_ms()
            with pytest.raises(TimeoutException, match="ApiVersionsRequest within 300 ms"):
                await connect(broker, timeout_ms=300)
            assert now_ms() - before == 300
            assert running_loop().connections == set()
            running_loop().silent.add(("127.0.0.1", broker.port))
            with pytest.raises(TimeoutException, match=rf"no connection to 127\.0\.0\.1:{broker.port} within 2000 ms"):
                await connect(broker)
            assert now_ms() - before == 2300

    async def test_later_calls_raise_the_first_failure(self) -> None:
        async with FakeBroker({ApiKey.HEARTBEAT: lambda *_: b"\xff\xff\xff\xff"}) as broker:
            connection = await connect(broker)
            for _ in range(2):
                with pytest.raises(DisconnectException, match="sent an invalid frame"):
                    await connection.call(HeartbeatRequest(), HeartbeatResponse)
            await connection.close()
            with pytest.raises(DisconnectException, match="sent an invalid frame"):
                await connection.call(HeartbeatRequest(), HeartbeatResponse)

    async def test_a_request_that_cannot_be_encoded_fails_alone(self) -> None:
        async with FakeBroker({ApiKey.HEARTBEAT: lambda *_: HeartbeatResponse()}) as broker:
            connection = await connect(broker)
            with pytest.raises(KafkaError, match=r"^INVALID_REQUEST: HeartbeatRequest: generation_id: 2147483648 does"):
                await connection.call(HeartbeatRequest(generation_id=1 << 31), HeartbeatResponse)
            with pytest.raises(KafkaError, match=r"^UNSUPPORTED_VERSION: HeartbeatRequest: "):
                await connection.call(HeartbeatRequest(group_instance_id="i"), HeartbeatResponse, highest=0)
            assert await connection.call(HeartbeatRequest(), HeartbeatResponse) == HeartbeatResponse()
            await connection.close()

    async def test_requests_are_pipelined(self) -> None:
        gate = asyncio.Event()

        async def slow(request: Message, version: int) -> Answer:
            await gate.wait()
            assert isinstance(request, HeartbeatRequest)
            return HeartbeatResponse(throttle_time_ms=request.generation_id)

        async with FakeBroker({ApiKey.HEARTBEAT: slow}) as broker:
            connection = await connect(broker)
            calls = [
                asyncio.create_task(connection.call(HeartbeatRequest(generation_id=number), HeartbeatResponse))
                for number in range(20)
            ]
            while connection.in_flight < 20:
                await asyncio.sleep(0)
            gate.set()
            assert [answer.throttle_time_ms for answer in await asyncio.gather(*calls)] == list(range(20))
            await connection.close()

    async def test_the_response_to_a_cancelled_request_is_dropped(self) -> None:
        gate = asyncio.Event()

        async def slow(request: Message, version: int) -> Answer:
            await gate.wait()
            assert isinstance(request, HeartbeatRequest)
            return HeartbeatResponse(throttle_time_ms=request.generation_id)

        async with FakeBroker({ApiKey.HEARTBEAT: slow}) as broker:
            connection = await connect(broker)
            first = asyncio.create_task(connection.call(HeartbeatRequest(generation_id=1), HeartbeatResponse))
            second = asyncio.create_task(connection.call(HeartbeatRequest(generation_id=2), HeartbeatResponse))
            while connection.in_flight < 2:
                await asyncio.sleep(0)
            first.cancel()
            gate.set()
            assert (await second).throttle_time_ms == 2
            await connection.close()

    async def test_a_timeout_closes_the_connection(self) -> None:
        async with FakeBroker({ApiKey.HEARTBEAT: lambda *_: None}) as broker:
            connection = await connect(broker, timeout_ms=30)
            with pytest.raises(TimeoutException, match="HeartbeatRequest"):
                await connection.call(HeartbeatRequest(), HeartbeatResponse)
            assert connection.is_closed
            with pytest.raises(DisconnectException):
                await connection.call(HeartbeatRequest(), HeartbeatResponse)
            await connection.close()

    @pytest.mark.parametrize(
        ("answer", "problem"),
        [
            (
                b"\x00\x00\x00\x06\x7f\x00\x00\x00\x00\x00",
                "as the response to request 2130706432, the next response is to request 1",
            ),
            (
                b"\x00\x00\x00\x03\x00\x00\x01",
                "as the response to request 1, the next response is to request 1",
            ),  # a cut correlation id
            (b"\x00\x00\x00\x04\x00\x00\x00\x01", "sent a malformed HeartbeatResponse"),  # a cut body
            (b"\xff\xff\xff\xff", "sent an invalid frame"),
        ],
    )
    async def test_a_damaged_response_closes_the_connection(self, answer: bytes, problem: str) -> None:
        async with FakeBroker({ApiKey.HEARTBEAT: lambda *_: answer}) as broker:
            connection = await connect(broker)
            with pytest.raises(DisconnectException, match=problem):
                await connection.call(HeartbeatRequest(), HeartbeatResponse)
            assert connection.is_closed
            await connection.close()

    async def test_a_malformed_answer_to_the_first_request_is_an_error_of_the_connection(self) -> None:
        async with FakeBroker({ApiKey.API_VERSIONS: lambda *_: b"\x00\x00\x00\x05\x00\x00\x00\x00\x00"}) as broker:
            with pytest.raises(DisconnectException, match="sent a malformed ApiVersionsResponse"):
                await connect(broker)

    async def test_waiting_requests_fail_when_the_broker_disconnects(self) -> None:
        async with FakeBroker({ApiKey.HEARTBEAT: lambda *_: None}) as broker:
            connection = await connect(broker)
            calls = [asyncio.create_task(connection.call(HeartbeatRequest(), HeartbeatResponse)) for _ in range(3)]
            while connection.in_flight < 3:
                await asyncio.sleep(0)
            broker.hang_up()
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, DisconnectException)
            await connection.close()

    async def test_a_refused_connection(self) -> None:
        async with FakeBroker() as broker:
            pass
        with pytest.raises(DisconnectException, match=str(broker.port)):
            await connect(broker)

    @pytest.mark.parametrize("error", [UnicodeError("label too long"), OverflowError("port must be 0-65535")])
    async def test_an_address_that_cannot_exist(self, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
        async def refuse(*_: object, **__: object) -> None:
            raise error

        async with FakeBroker() as broker:
            monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refuse)
            with pytest.raises(DisconnectException, match=f"no connection to .*: {error}"):
                await connect(broker)

    async def test_a_broker_without_tls_fails_with_a_reason(self) -> None:
        class Encrypted:
            def ssl_context(self) -> ssl.SSLContext | None:
                return ssl.create_default_context()

            async def authenticate(self, sender: RequestSender) -> None:
                raise AssertionError

        async with FakeBroker() as broker:
            with pytest.raises(DisconnectException, match=rf"no connection to 127\.0\.0\.1:{broker.port}: \S+"):
                await connect(broker, security=Encrypted())

    async def test_authentication_comes_before_everything_else(self) -> None:
        class Handshake:
            def ssl_context(self) -> ssl.SSLContext | None:
                return None

            async def authenticate(self, sender: RequestSender) -> None:
                answer = await sender.call(SaslHandshakeRequest(mechanism="PLAIN"), SaslHandshakeResponse)
                if answer.error_code:
                    raise KafkaError(Errors(answer.error_code))

        error = Errors.NONE
        handlers = {ApiKey.SASL_HANDSHAKE: lambda *_: SaslHandshakeResponse(error_code=error)}
        async with FakeBroker(handlers) as broker:
            connection = await connect(broker, security=Handshake())
            assert [key for key, _, _ in broker.requests] == [ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE]
            await connection.close()
            error = Errors.UNSUPPORTED_SASL_MECHANISM
            with pytest.raises(KafkaError, match="UNSUPPORTED_SASL_MECHANISM"):
                await connect(broker, security=Handshake())


class TestCluster:
    async def test_each_purpose_has_one_connection(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            first, same, other = await asyncio.gather(
                cluster.connection(1), cluster.connection(1), cluster.connection(1, Purpose.FETCHES)
            )
            assert first is same
            assert first is not other

    async def test_reconnects(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            first = await cluster.connection(1)
            broker.hang_up()
            while not first.is_closed:
                await asyncio.sleep(0.001)
            assert not (await cluster.connection(1)).is_closed

    async def test_api_versions_names_the_expected_broker(self) -> None:
        async with FakeBroker() as broker, cluster_of(broker) as cluster:
            await cluster.connection(1)
        asked = [
            (version, request.cluster_id, request.node_id)
            for _, version, request in broker.requests
            if isinstance(request, ApiVersionsRequest)
        ]
        assert asked == [(5, None, -1), (5, "fake", 1)]

    @pytest.mark.parametrize("where", ["ApiVersions", "Metadata"])
    async def test_a_rebootstrap_when_the_cluster_has_changed(self, where: str) -> None:
        """The client drops the brokers that it knew, and the request succeeds in the end (KIP-1242, KIP-1102)."""
        has_moved = False

        def api_versions(request: Message, version: int) -> Answer:
            assert isinstance(request, ApiVersionsRequest)
            if where == "ApiVersions" and has_moved and request.cluster_id == "fake":
                return ApiVersionsResponse(error_code=Errors.REBOOTSTRAP_REQUIRED)
            return ApiVersionsResponse(api_keys=broker.api_versions())

        def metadata(request: Message, version: int) -> Answer:
            if where == "Metadata" and has_moved and len(broker.requests_of(ApiKey.API_VERSIONS)) == 2:
                return MetadataResponse(error_code=Errors.REBOOTSTRAP_REQUIRED)
            node = MetadataResponse.MetadataResponseBroker(node_id=1, host="127.0.0.1", port=broker.port)
            return MetadataResponse(brokers=[node], controller_id=1, cluster_id="new" if has_moved else "fake")

        handlers = {ApiKey.API_VERSIONS: api_versions, ApiKey.METADATA: metadata}
        async with FakeBroker(handlers) as broker, cluster_of(broker) as cluster:
            first = await cluster.connection(1)
            has_moved = True
            if where == "ApiVersions":
                broker.hang_up()
                while not first.is_closed:
                    await asyncio.sleep(0.001)
                with pytest.raises(DisconnectException, match="REBOOTSTRAP_REQUIRED"):
                    await cluster.connection(1)
                assert cluster.metadata.brokers == {}
            await cluster.retry("it", cluster.deadline(2000), lambda: cluster.refresh_metadata(()))
            assert (cluster.metadata.cluster_id, list(cluster.metadata.brokers)) == ("new", [1])
            assert first.is_closed
            assert not (await cluster.connection(1)).is_closed

    async def test_bootstrap_waits_for_a_broker(self) -> None:
        async with FakeBroker() as broker:
            pass
        late = FakeBroker()
        late.port = broker.port
        opening = asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(late.open()))
        async with cluster_of(late) as cluster:
            assert cluster.metadata.cluster_id == "fake"
        opening.cancel()
        await late.__aexit__()

    async def test_retriable_errors_are_retried_until_the_deadline(self) -> None:
        attempts = 0

        async def attempt() -> int:
            nonlocal attempts
            attempts += 1
            if attempts < 4:
                raise KafkaError(Errors.COORDINATOR_LOAD_IN_PROGRESS)
            return attempts

        async def never() -> int:
            raise KafkaError(Errors.NOT_COORDINATOR, "still moving")

        async def refused() -> int:
            raise KafkaError(Errors.INVALID_REQUEST)

        async with FakeBroker() as broker, cluster_of(broker, retry_backoff_max_ms=5) as cluster:
            assert await cluster.retry("it", cluster.deadline(2000), attempt) == 4
            with pytest.raises(TimeoutException, match="still moving"):
                await cluster.retry("it", cluster.deadline(30), never)
            with pytest.raises(KafkaError, match="INVALID_REQUEST"):
                await cluster.retry("it", cluster.deadline(2000), refused)

    async def test_a_coordinator_is_cached_until_it_moves(self) -> None:
        errors = [Errors.NONE, Errors.NOT_COORDINATOR, Errors.COORDINATOR_NOT_AVAILABLE, Errors.NONE]

        def delete(request: Message, version: int) -> Answer:
            result = DeleteGroupsResponse.DeletableGroupResult(group_id="g", error_code=errors.pop(0))
            return DeleteGroupsResponse(results=[result])

        async with FakeBroker({ApiKey.DELETE_GROUPS: delete}) as broker, cluster_of(broker) as cluster:

            async def call() -> DeleteGroupsResponse:
                return await cluster.call_coordinator(
                    CoordinatorType.GROUP,
                    "g",
                    DeleteGroupsRequest(groups_names=["g"]),
                    DeleteGroupsResponse,
                    lambda answer: [result.error_code for result in answer.results],
                )

            await call()
            assert len(broker.requests_of(ApiKey.FIND_COORDINATOR)) == 1
            await cluster.retry("it", cluster.deadline(2000), call)
            assert errors == []
            assert len(broker.requests_of(ApiKey.FIND_COORDINATOR)) == 3

    async def test_an_old_broker_returns_one_coordinator_at_a_time(self) -> None:
        async with FakeBroker(find_coordinator=(0, 3)) as broker, cluster_of(broker) as cluster:
            coordinators = await cluster.find_coordinators(CoordinatorType.GROUP, ["g", "h"])
            assert [node.node_id for node in coordinators.values() if not isinstance(node, KafkaError)] == [1, 1]
            assert len(broker.requests_of(ApiKey.FIND_COORDINATOR)) == 2

    async def test_a_failed_lookup_raises_its_error(self) -> None:
        def unavailable(request: Message, version: int) -> Answer:
            answer = FindCoordinatorResponse.Coordinator(key="g", error_code=Errors.GROUP_AUTHORIZATION_FAILED)
            return FindCoordinatorResponse(coordinators=[answer])

        async with FakeBroker({ApiKey.FIND_COORDINATOR: unavailable}) as broker, cluster_of(broker) as cluster:
            with pytest.raises(KafkaError, match="GROUP_AUTHORIZATION_FAILED"):
                await cluster.coordinator(CoordinatorType.GROUP, "g")

    async def test_calls_of_a_closed_client_fail(self) -> None:
        async with FakeBroker() as broker:
            async with cluster_of(broker) as cluster:
                pass
            with pytest.raises(IllegalStateException):
                await cluster.connection(1)
