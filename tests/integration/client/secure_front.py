# SPDX-License-Identifier: Apache-2.0
"""A proxy in front of a broker, with TLS and scripted SASL. After them it passes all bytes on unchanged."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from kcoord_protocol.api_keys import ApiKey
from kcoord_protocol.errors import Errors
from kcoord_protocol.framing import decode_request_header, encode_response
from kcoord_protocol.messages import (
    ApiVersionsResponse,
    SaslAuthenticateRequest,
    SaslAuthenticateResponse,
    SaslHandshakeRequest,
    SaslHandshakeResponse,
)

CERTIFICATE = Path(__file__).parent / "tls" / "localhost.pem"

Step = Callable[[bytes], tuple[Errors, bytes]]
"""Returns the server's response to the client's bytes. An error ends the exchange."""

_SASL_APIS = (ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE)


class SecureFront:
    """The proxy. Clients must go through all steps of `script`, unless `mechanism` is None (TLS only)."""

    def __init__(self, mechanism: str | None = None, script: tuple[Step, ...] = (), *, tls: bool = True) -> None:
        self.port = 0
        self.broker_port = 0
        self.authenticated = 0
        self._mechanism = mechanism
        self._script = script
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH) if tls else None
        if self._context is not None:
            self._context.load_cert_chain(CERTIFICATE)

    @asynccontextmanager
    async def open(self) -> AsyncIterator[SecureFront]:
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._context)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        inner_reader, inner_writer = await asyncio.open_connection("127.0.0.1", self.broker_port)
        try:
            if self._mechanism is None or await self._authenticate(reader, writer, inner_reader, inner_writer):
                await asyncio.gather(_pump(reader, inner_writer), _pump(inner_reader, writer))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()
            inner_writer.close()

    async def _authenticate(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        inner_reader: asyncio.StreamReader,
        inner_writer: asyncio.StreamWriter,
    ) -> bool:
        """Responds to requests until the script is done. Returns whether the client is authenticated.

        Any request but ApiVersions and those of SASL ends the connection.
        """
        steps = list(self._script)
        while steps:
            frame = await _read_frame(reader)
            header, position = decode_request_header(frame)
            key, version = ApiKey(header.request_api_key), header.request_api_version
            if key is ApiKey.API_VERSIONS:
                inner_writer.write(len(frame).to_bytes(4, "big") + frame)
                answer = (await _read_frame(inner_reader))[4:]
                versions = ApiVersionsResponse.decode(answer, version)
                versions.api_keys += (
                    ApiVersionsResponse.ApiVersion(api_key=api_key, min_version=0, max_version=1)
                    for api_key in _SASL_APIS
                )
                writer.write(encode_response(header.correlation_id, key, version, versions.encode(version)))
            elif key is ApiKey.SASL_HANDSHAKE:
                mechanism = SaslHandshakeRequest.decode(frame[position:], version).mechanism
                error = Errors.NONE if mechanism == self._mechanism else Errors.UNSUPPORTED_SASL_MECHANISM
                shake = SaslHandshakeResponse(error_code=error, mechanisms=[self._mechanism or ""])
                writer.write(encode_response(header.correlation_id, key, version, shake.encode(version)))
            elif key is ApiKey.SASL_AUTHENTICATE:
                message = SaslAuthenticateRequest.decode(frame[position:], version).auth_bytes
                error, data = steps.pop(0)(message)
                done = SaslAuthenticateResponse(
                    error_code=error, error_message="no" if error else None, auth_bytes=data
                )
                writer.write(encode_response(header.correlation_id, key, version, done.encode(version)))
                if error:
                    await writer.drain()
                    return False
            else:
                return False
        self.authenticated += 1
        return True


async def _read_frame(reader: asyncio.StreamReader) -> bytes:
    size = int.from_bytes(await reader.readexactly(4), "big")
    return await reader.readexactly(size)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
