# SPDX-License-Identifier: Apache-2.0
"""Compression codecs: round trips, and the framings that other clients write."""

from __future__ import annotations

import gzip
import subprocess
import sys

import lz4.frame
import pytest
import zstandard
from cramjam import snappy
from hypothesis import given
from hypothesis import strategies as st
from kafka import codec as kafka_python

from kcoord_protocol.compression import Compression, compress, decompress

TEXT = b"".join(b"line %d of some text\n" % n for n in range(5000))


@given(st.sampled_from(Compression), st.binary() | st.binary(max_size=50).map(lambda data: data * 3000))
def test_round_trip(codec: Compression, data: bytes) -> None:
    assert decompress(codec, compress(codec, data)) == data


@pytest.mark.parametrize("codec", Compression)
def test_text_gets_smaller(codec: Compression) -> None:
    assert (len(compress(codec, TEXT)) < len(TEXT) / 2) == (codec is not Compression.NONE)


def test_raw_snappy_and_several_xerial_streams() -> None:
    """librdkafka writes raw snappy, and Java writes xerial blocks. snappy-java reads concatenated streams."""
    assert decompress(Compression.SNAPPY, bytes(snappy.compress_raw(TEXT))) == TEXT
    stream = compress(Compression.SNAPPY, TEXT)
    assert stream.startswith(b"\x82SNAPPY\x00\x00\x00\x00\x01\x00\x00\x00\x01")
    assert decompress(Compression.SNAPPY, stream + stream) == TEXT * 2


def test_several_gzip_members_and_zstd_frames() -> None:
    assert decompress(Compression.GZIP, gzip.compress(TEXT) + gzip.compress(b"end")) == TEXT + b"end"
    frame = zstandard.ZstdCompressor(write_content_size=False).compress
    assert decompress(Compression.ZSTD, frame(TEXT) + frame(b"end")) == TEXT + b"end"


def test_lz4_blocks_are_independent_and_may_have_any_frame_options() -> None:
    assert not lz4.frame.get_frame_info(compress(Compression.LZ4, TEXT))["block_linked"]
    options = {"block_linked": True, "content_checksum": True, "block_checksum": True, "store_size": True}
    assert decompress(Compression.LZ4, lz4.frame.compress(TEXT, **options)) == TEXT


@pytest.mark.parametrize("codec", [Compression.GZIP, Compression.LZ4, Compression.ZSTD])
def test_kafka_python_agrees(codec: Compression) -> None:
    name = codec.name.lower()
    assert getattr(kafka_python, f"{name}_decode")(compress(codec, TEXT)) == TEXT
    assert decompress(codec, getattr(kafka_python, f"{name}_encode")(TEXT)) == TEXT


def test_libraries_are_imported_on_first_use() -> None:
    libraries = {"lz4", "cramjam", "zstandard", "importlib.metadata"}
    script = f"import sys, kcoord_protocol.record_batch; print(*{libraries} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == ""
