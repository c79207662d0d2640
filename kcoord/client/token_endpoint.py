# SPDX-License-Identifier: Apache-2.0
"""Gets a token of OAUTHBEARER from an identity provider over https, or from a file. The functions here block.

The provider is asked as in Kafka's client: the grant `client_credentials` (RFC 6749, section 4.4), with the id and the
secret of the client in the header Authorization. Redirects and proxies are not followed, because they would get the
secret. No error shows a secret or a token.
"""

from __future__ import annotations

import json
import ssl
from base64 import b64encode
from dataclasses import dataclass, field
from http.client import HTTPException, HTTPSConnection
from pathlib import Path
from typing import Final
from urllib.parse import quote_plus, urlencode, urlsplit
from urllib.request import url2pathname

LARGEST_BYTES: Final = 1 << 20
_LONGEST_PROBLEM: Final = 200
_SUCCESS: Final = (200, 201)
_FINAL_STATUSES: Final = frozenset(
    (400, 401, 402, 403, 404, 405, 406, 407, 409, 410, 411, 412, 413, 414, 415, 501, 505)
)
"""The statuses after which Kafka's client does not ask again. Redirects are added to them."""


class TokenRequestError(Exception):
    """There is no token. `is_retriable`: the next request may succeed."""

    def __init__(self, problem: str, *, is_retriable: bool) -> None:
        super().__init__(problem)
        self.is_retriable = is_retriable


@dataclass(frozen=True, slots=True)
class TokenEndpoint:
    """An https address that issues tokens. `urlencodes_header`: as RFC 6749 demands, but few providers expect."""

    url: str
    client_id: str
    client_secret: str = field(repr=False)
    scope: str
    context: ssl.SSLContext
    connect_timeout_seconds: float
    read_timeout_seconds: float
    urlencodes_header: bool

    def request_token(self) -> str:
        """Returns a new token; raises TokenRequestError."""
        parts = urlsplit(self.url)
        connection = HTTPSConnection(
            parts.hostname or "", parts.port, timeout=self.connect_timeout_seconds, context=self.context
        )
        try:
            connection.connect()
            connection.sock.settimeout(self.read_timeout_seconds)
            target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
            connection.request("POST", target, self._body(), self._headers())
            response = connection.getresponse()
            status, body = response.status, response.read(LARGEST_BYTES + 1)
        except (OSError, HTTPException) as error:
            raise TokenRequestError(f"{self.url}: {str(error) or type(error).__name__}", is_retriable=True) from error
        finally:
            connection.close()
        if status not in _SUCCESS:
            is_final = status in _FINAL_STATUSES or 300 <= status < 400
            raise TokenRequestError(f"{self.url}: status {status}{_problem_of(body)}", is_retriable=not is_final)
        token = _json_object(body).get("access_token")
        if not isinstance(token, str) or not token.strip():
            raise TokenRequestError(f"{self.url}: the response has no access_token", is_retriable=False)
        return token.strip()

    def _headers(self) -> dict[str, str]:
        client = [self.client_id.strip(), self.client_secret.strip()]
        if self.urlencodes_header:
            client = [quote_plus(text) for text in client]
        return {
            "Accept": "application/json",
            "Authorization": f"Basic {b64encode(':'.join(client).encode()).decode()}",
            "Cache-Control": "no-cache",
            "Content-Type": "application/x-www-form-urlencoded",
        }

    def _body(self) -> str:
        scope = self.scope.strip()
        return urlencode({"grant_type": "client_credentials", **({"scope": scope} if scope else {})})


def read_token_file(url: str) -> str:
    """Returns the token in the file of a file: address; raises TokenRequestError."""
    path = Path(url2pathname(urlsplit(url).path))
    try:
        with path.open("rb") as file:
            token = file.read(LARGEST_BYTES).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise TokenRequestError(f"{path}: {reason}", is_retriable=False) from None
    if not token:
        raise TokenRequestError(f"{path}: the file is empty", is_retriable=False)
    return token


def _problem_of(body: bytes) -> str:
    """Returns what the provider says about an error (RFC 6749, section 5.2), with a separator before it."""
    response = _json_object(body)
    texts = [response.get("error"), response.get("error_description")]
    shown = " - ".join(text for text in texts if isinstance(text, str))
    printable = "".join([character if character.isprintable() else "?" for character in shown])
    return f", {printable[:_LONGEST_PROBLEM]}" if shown else ""


def _json_object(body: bytes) -> dict[str, object]:
    """Returns the JSON object of a response, an empty one if it has another form."""
    try:
        parsed = json.loads(body)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}
