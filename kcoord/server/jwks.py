# SPDX-License-Identifier: Apache-2.0
"""The public keys of an identity provider, from a file or an https address.

Theory of operation. `start` reads the keys before the listener accepts connections, and fails if it cannot. From then
on `keys` is the last key set that could be read; authentications never wait for the provider.

A file is read once. An address is read again in three cases, always in a thread, by one task of the event loop:

* `sasl.oauthbearer.jwks.endpoint.refresh.ms` have passed.
* A token named a key id that the set does not have (`missing`). That token is refused; the client tries again, and
  finds the new key. Each id counts once in MISSING_SECONDS, and the provider is asked at most once in LEAST_SECONDS,
  so tokens with random ids cause no storm of requests.
* The last attempt failed. The delay doubles from `...retry.backoff.ms` to `...retry.backoff.max.ms`. The old keys
  stay in use meanwhile.

The provider is asked by https only, also after a redirect: redirects are refused. The certificate authorities are those
of the system; the environment variables SSL_CERT_FILE and SSL_CERT_DIR name others.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from email.message import Message
from http.client import HTTPException
from pathlib import Path
from typing import IO, Final, NoReturn
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, HTTPSHandler, ProxyHandler, Request, build_opener, url2pathname

from kcoord.security.oauthbearer import JwkKeys, TokenError

MISSING_SECONDS: Final = 60.0
LEAST_SECONDS: Final = 1.0
MOST_MISSING: Final = 1000
"""The number of unknown key ids that are remembered. More at once are not looked for."""
LONGEST_KEY_ID: Final = 512
LARGEST_BYTES: Final = 1 << 20
_TIMEOUT_SECONDS: Final = 5.0
"""The broker waits for a request under way when it ends, so this is short."""
_MOST_DOUBLINGS: Final = 30
_LEAST_BACKOFF_MS: Final = 10

_logger = logging.getLogger(__name__)


class JwksError(ValueError):
    """The keys cannot be read."""


@dataclass(frozen=True, slots=True)
class JwksSettings:
    """Where the keys are, and how often they are read, in milliseconds."""

    url: str
    refresh_ms: int
    backoff_ms: int
    backoff_max_ms: int


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(
        self, req: Request, fp: IO[bytes], code: int, msg: str, headers: Message, newurl: str
    ) -> NoReturn:
        raise HTTPError(req.full_url, code, "redirects are refused", headers, fp)


def read_keys(url: str) -> JwkKeys:
    """Reads and parses the keys at a file: or https: address; blocks. Raises JwksError."""
    parts = urlsplit(url)
    try:
        if parts.scheme == "file":
            document = Path(url2pathname(parts.path)).read_bytes()
        elif parts.scheme == "https":
            opener = build_opener(ProxyHandler({}), HTTPSHandler(context=ssl.create_default_context()), _NoRedirects)
            with opener.open(Request(url, headers={"Accept": "application/json"}), timeout=_TIMEOUT_SECONDS) as answer:
                document = answer.read(LARGEST_BYTES + 1)
        else:
            raise JwksError(f"{url}: the scheme is not file or https")
        if len(document) > LARGEST_BYTES:
            raise JwksError(f"{url}: the key set has more than {LARGEST_BYTES} bytes")
        keys = JwkKeys(document)
    except (OSError, HTTPException, TokenError) as error:
        raise JwksError(f"{url}: {error}") from error
    for reason in keys.skipped:
        _logger.warning("%s: a key is not used: %s", url, reason)
    return keys


class JwksSource:
    """The current keys of one listener; the module describes when they are read again."""

    def __init__(self, settings: JwksSettings, read: Callable[[str], JwkKeys] = read_keys) -> None:
        self._settings = settings
        self._read = read
        self.keys = read(settings.url)
        self._missing: dict[str, float] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to read the keys again when that is due. Keys of a file stay as they are."""
        if self._task is None and urlsplit(self._settings.url).scheme == "https":
            self._task = asyncio.create_task(self._refresh())

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def missing(self, key_id: str) -> None:
        """Reads the keys soon, because a token named a key id that they do not have."""
        now_seconds = asyncio.get_running_loop().time()
        if len(key_id) > LONGEST_KEY_ID:
            return
        self._missing = {name: until for name, until in self._missing.items() if until > now_seconds}
        if key_id not in self._missing and len(self._missing) < MOST_MISSING:
            self._missing[key_id] = now_seconds + MISSING_SECONDS
            self._wake.set()

    async def _refresh(self) -> None:
        settings = self._settings
        failures = 0
        while True:
            if failures:
                delay_ms = min(settings.backoff_ms << failures - 1, settings.backoff_max_ms)
                await asyncio.sleep(max(delay_ms, _LEAST_BACKOFF_MS) / 1000)
            else:
                await asyncio.sleep(LEAST_SECONDS)
                with suppress(TimeoutError):
                    async with asyncio.timeout(settings.refresh_ms / 1000 - LEAST_SECONDS):
                        await self._wake.wait()
            self._wake.clear()
            try:
                self.keys = await asyncio.to_thread(self._read, settings.url)
                failures = 0
            except JwksError as error:
                failures = min(failures + 1, _MOST_DOUBLINGS)
                _logger.warning("The keys of the identity provider cannot be read; the old keys stay: %s", error)
