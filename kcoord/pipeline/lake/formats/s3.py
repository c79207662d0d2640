# SPDX-License-Identifier: Apache-2.0
"""Converts the options of an `s3://` URI to the settings of each library that reads or writes a lake there.

The URI is pyarrow's: `s3://KEY:SECRET@bucket/path?endpoint_override=HOST:PORT&scheme=http&region=NAME`. If a part is
missing, each library uses its own default, usually from the environment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self
from urllib.parse import parse_qsl, unquote, urlsplit

SCHEME: Final = "s3"
HADOOP_FILE_SYSTEM: Final = {"fs.s3.impl": "org.apache.hadoop.fs.s3a.S3AFileSystem"}
"""Maps `s3` to Hadoop's S3A. Hadoop's own name is `s3a`, which not all other libraries support."""


@dataclass(frozen=True, slots=True)
class S3Options:
    """The parts of the URI; None for a missing part. `endpoint` is a URL."""

    bucket: str
    path: str
    access_key: str | None
    secret_key: str | None
    endpoint: str | None
    region: str | None

    @classmethod
    def of(cls, uri: str) -> Self | None:
        """Parses a URI. Returns None if its scheme is not `s3`."""
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
        """The URI without options and secrets."""
        return f"{SCHEME}://{self.bucket}{self.path}"

    def hadoop(self) -> dict[str, str]:
        """Returns the settings of Hadoop's S3A for this bucket."""
        named = {
            "access.key": self.access_key,
            "secret.key": self.secret_key,
            "endpoint": self.endpoint,
            "endpoint.region": self.region,
            # With an endpoint of its own the bucket is in the path, not in the name of the server.
            "path.style.access": "true" if self.endpoint else None,
        }
        return {f"fs.s3a.bucket.{self.bucket}.{key}": value for key, value in _said(named).items()}

    def delta(self) -> dict[str, str]:
        """Returns the storage options of deltalake."""
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
        """Returns the properties of a catalog of pyiceberg."""
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
