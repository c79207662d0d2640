# SPDX-License-Identifier: Apache-2.0
"""Conversion of the options of an `s3://` URI for Hadoop, deltalake and pyiceberg."""

from __future__ import annotations

from kcoord.pipeline.lake.formats.s3 import S3Options


def of(uri: str) -> S3Options:
    options = S3Options.of(uri)
    assert options is not None
    return options


def test_a_uri_without_options_gives_no_settings() -> None:
    options = of("s3://bucket/path/to/lake/")
    assert options.uri == "s3://bucket/path/to/lake"
    assert (options.hadoop(), options.delta(), options.iceberg()) == ({}, {}, {})


def test_each_library_gets_the_options_of_the_uri() -> None:
    options = of("s3://key:se%2Fcret@bucket/lake?endpoint_override=localhost:9000&scheme=http&region=eu-1")
    assert options.uri == "s3://bucket/lake"
    assert options.hadoop() == {
        "fs.s3a.bucket.bucket.access.key": "key",
        "fs.s3a.bucket.bucket.secret.key": "se/cret",
        "fs.s3a.bucket.bucket.endpoint": "http://localhost:9000",
        "fs.s3a.bucket.bucket.endpoint.region": "eu-1",
        "fs.s3a.bucket.bucket.path.style.access": "true",
    }
    assert options.delta() == {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "se/cret",
        "AWS_ENDPOINT_URL": "http://localhost:9000",
        "AWS_REGION": "eu-1",
        "AWS_ALLOW_HTTP": "true",
    }
    assert options.iceberg() == {
        "s3.access-key-id": "key",
        "s3.secret-access-key": "se/cret",
        "s3.endpoint": "http://localhost:9000",
        "s3.region": "eu-1",
    }


def test_an_endpoint_is_https_unless_the_uri_says_otherwise() -> None:
    options = of("s3://bucket?endpoint_override=store.example")
    assert options.iceberg() == {"s3.endpoint": "https://store.example"}
    assert "AWS_ALLOW_HTTP" not in options.delta()
    assert options.uri == "s3://bucket"


def test_local_paths_and_other_schemes_have_no_s3_options() -> None:
    assert S3Options.of("/data/lake") is None
    assert S3Options.of("gs://bucket/lake") is None
