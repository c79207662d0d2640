# SPDX-License-Identifier: Apache-2.0
"""When the keys of an identity provider are read again, on virtual time; and which addresses are read at all."""

from __future__ import annotations

import asyncio
import http.client
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kcoord.security.oauthbearer import JwkKeys
from kcoord.server import jwks
from kcoord.server.jwks import JwksError, JwksSettings, JwksSource, read_keys
from tests.unit.client.virtual_loop import now_ms, run
from tests.unit.security.test_oauthbearer import RSA, jwk

DOCUMENT = json.dumps({"keys": [jwk(RSA, kid="r")]}).encode()
SETTINGS = JwksSettings("https://issuer/keys", 600_000, 100, 1_000)


class Provider:
    """Notes the times in milliseconds at which it is asked. While `is_down` it does not answer."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self.is_down = False

    def read(self, url: str) -> JwkKeys:
        self.asked.append(now_ms())
        if self.is_down:
            raise JwksError(f"{url}: it is down")
        return JwkKeys(DOCUMENT)


async def _call_here(function: Callable[[str], JwkKeys], url: str) -> JwkKeys:
    return function(url)


@pytest.fixture
def provider(monkeypatch: pytest.MonkeyPatch) -> Provider:
    monkeypatch.setattr(asyncio, "to_thread", _call_here)
    return Provider()


def test_keys_are_read_again_after_the_refresh_time(provider: Provider) -> None:
    async def scenario() -> None:
        source = JwksSource(SETTINGS, provider.read)
        source.start()
        await asyncio.sleep(1201)
        source.stop()

    run(scenario())
    assert provider.asked == [0, 600_000, 1_200_000]


def test_an_unknown_key_id_is_looked_for_once_a_minute(provider: Provider) -> None:
    async def scenario() -> None:
        source = JwksSource(SETTINGS, provider.read)
        source.start()
        await asyncio.sleep(10)
        for key_id in ("new", "new", "x" * 513):
            source.missing(key_id)
        await asyncio.sleep(20)
        source.missing("new")
        await asyncio.sleep(50)
        source.missing("new")
        await asyncio.sleep(5)
        source.stop()

    run(scenario())
    assert provider.asked == [0, 10_000, 80_000]


def test_random_key_ids_cause_no_storm(provider: Provider) -> None:
    async def scenario() -> None:
        source = JwksSource(SETTINGS, provider.read)
        source.start()
        for number in range(5000):
            source.missing(f"id-{number}")
            await asyncio.sleep(0.001)
        source.stop()

    run(scenario())
    assert len(provider.asked) <= 6


def test_a_provider_that_is_down_is_asked_with_a_growing_delay(provider: Provider) -> None:
    async def scenario() -> None:
        source = JwksSource(SETTINGS, provider.read)
        keys = source.keys
        source.start()
        provider.is_down = True
        await asyncio.sleep(602)
        assert source.keys is keys
        provider.is_down = False
        await asyncio.sleep(2)
        assert source.keys is not keys
        source.stop()

    run(scenario())
    assert [asked - 600_000 for asked in provider.asked[1:]] == pytest.approx([0, 100, 300, 700, 1500, 2500])


def test_the_start_fails_without_keys(provider: Provider) -> None:
    async def scenario() -> None:
        provider.is_down = True
        with pytest.raises(JwksError, match="it is down"):
            JwksSource(SETTINGS, provider.read)

    run(scenario())


def test_a_file_is_read_once(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_bytes(DOCUMENT)

    async def scenario() -> None:
        source = JwksSource(JwksSettings(path.as_uri(), 600_000, 100, 1_000))
        source.start()
        path.unlink()
        await asyncio.sleep(1500)
        assert source.keys.key("r", "RS256") is not None
        source.stop()

    run(scenario())


@pytest.mark.parametrize("url", ["http://issuer/keys", "ftp://x", "keys.json", ""])
def test_other_addresses_are_refused(url: str) -> None:
    with pytest.raises(JwksError, match="not file or https"):
        read_keys(url)


def test_a_file_that_is_missing_or_too_large(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(JwksError, match="No such file"):
        read_keys(path.as_uri())
    path.write_bytes(b" " * (jwks.LARGEST_BYTES + 1))
    with pytest.raises(JwksError, match="more than"):
        read_keys(path.as_uri())


@pytest.mark.parametrize(
    "error", [http.client.BadStatusLine("x"), http.client.IncompleteRead(b"{"), http.client.LineTooLong("header line")]
)
def test_a_provider_with_broken_responses(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    class Opener:
        def open(self, request: object, timeout: float) -> object:
            raise error

    monkeypatch.setattr(jwks, "build_opener", lambda *handlers: Opener())
    with pytest.raises(JwksError, match="https://issuer/keys"):
        read_keys("https://issuer/keys")


def test_a_document_that_is_nested_too_deeply(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text('{"keys":' + "[" * 100_000)
    with pytest.raises(JwksError, match="not JSON"):
        read_keys(path.as_uri())
