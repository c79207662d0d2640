# SPDX-License-Identifier: Apache-2.0
"""The options of an `s3://` URI, in the words of each library that reads or writes a lake there.

The URI is pyarrow's: `s3://KEY:SECRET@bucket/path?endpoint_override=HOST:PORT&scheme=http&region=NAME`. Without a part
each library looks for it as it always does, in the environment above all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import parse_qsl, unquote, urlsplit

SCHEME: Final = "s3"
HADOOP_FILE_SYSTEM: Final = {"fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem"}
"""Hadoop's own name for it is `s3a`, which the other libraries do not all know."""


@dataclass(frozen=True, slots=True)
class S3Options:
    """What the URI says; None for what it does not say. `endpoint` is a URL."""

    bucket: str
    path: str
    access_key: str | None
    secret_key: str | None
    endpoint: str | None
    region: str | None

    @classmethod
    def of(cls, uri: str) -> Self | None:
        """None if the URI is not of S3."""
        parts = urlsplit(uri)
        if parts.scheme != SCHEME:
            return None
        query = dict(parse_qsl(parts.query))
        host = query.get("endpoint_override")
        endpoint = None
        if host:
            endpoint = host if "://" in host else f"{query.get('scheme', 'https')}://{host}"
        return cls(
            parts.netloc.rpartition("@")[2],
            parts.path.rstrip("/"),
            None if parts.username is None else unquote(parts.username),
            None if parts.password is None else unquote(parts.password),
            endpoint,
            query.get("region"),
        )

    @property
    def uri(self) -> str:
        """Without options and secrets."""
        return f"{SCHEME}://{self.bucket}{self.path}"

    def hadoop(self) -> dict[str, str]:
        """Settings of Hadoop's S3A for this bucket."""
        named = {
            "access.key": self.access_key,
            "secret.key": self.secret_key,
            "endpoint": self.endpoint,
            "endpoint.region": self.region,
            # The bucket is no part of the name of such a server.
            "path.style.access": "true" if self.endpoint else None,
        }
        return {f"fs.s3a.bucket.{self.bucket}.{key}": value for key, value in _said(named).items()}

    def delta(self) -> dict[str, str]:
        """Storage options of deltalake."""
        return _said(
            {
                "AWS_ACCESS_KEY_ID": self.access_key,
                "AWS_SECRET_ACCESS_KEY": self.secret_key,
                "AWS_ENDPOINT_URL": self.endpoint,
                "AWS_REGION": self.region,
                "AWS_ALLOW_HTTP": "true" if self.endpoint and self.endpoint.startswith("http://") else None,
            }
        )

    def iceberg(self) -> dict[str, str]:
        """Properties of a catalog of pyiceberg."""
        return _said(
            {
                "s3.access-key-id": self.access_key,
                "s3.secret-access-key": self.secret_key,
                "s3.endpoint": self.endpoint,
                "s3.region": self.region,
            }
        )


def _said(options: dict[str, str | None]) -> dict[str, str]:
    return {key: value for key, value in options.items() if value is not None}
