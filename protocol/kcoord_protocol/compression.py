# SPDX-License-Identifier: Apache-2.0
"""The compression codecs of record batches, in the framings that Kafka's own clients read and write.

The libraries for snappy, lz4 and zstd are imported on first use. The size of decompressed data is limited before and
during decompression, so that a few hostile bytes cannot become gigabytes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from enum import IntEnum
from struct import Struct
from typing import Final

from kcoord_protocol.errors import BatchTooLargeError, CorruptBatchError
from kcoord_protocol.primitives import decode_uvarint

MAX_DECOMPRESSED_BYTES: Final = 256 << 20
# Deflate reaches at most about 1032 to 1 (lz4: 255, snappy: 22). Zstd can exceed that, but above UNSUSPICIOUS_BYTES
# only a decompression bomb does.
MAX_COMPRESSION_RATIO: Final = 1032
UNSUSPICIOUS_BYTES: Final = 16 << 20

LZ4_DEFAULT_LEVEL: Final = 9
ZSTD_DEFAULT_LEVEL: Final = 3

_GZIP_WINDOW_BITS: Final = 31
_ZSTD_MAX_WINDOW_BYTES: Final = 128 << 20
_ZSTD_READ_BYTES: Final = 128 << 10
_XERIAL_MAGIC: Final = b"\x82SNAPPY\x00"
_XERIAL_HEADER: Final = _XERIAL_MAGIC + b"\x00\x00\x00\x01\x00\x00\x00\x01"
_XERIAL_BLOCK_BYTES: Final = 32 << 10
_SNAPPY_MAX_RATIO: Final = 22
_LZ4_MAX_RATIO: Final = 255
_INT32: Final = Struct(">i")


class Compression(IntEnum):
    """The codec in the lowest three bits of a batch's attributes."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


def compress(codec: Compression, data: bytes, level: int | None = None) -> bytes:
    """Compress the records of a batch.

    `level` is the codec's, as in Kafka's compression.*.level; None is the default. Snappy has no levels.
    """
    return _COMPRESSORS[codec](data, level)


def decompress(codec: Compression, data: bytes, max_bytes: int | None = None) -> bytes:
    """Decompress the records of a batch.

    Raise BatchTooLargeError if they exceed `max_bytes`, or MAX_COMPRESSION_RATIO above UNSUSPICIOUS_BYTES.
    """
    honest_bytes = max(UNSUSPICIOUS_BYTES, len(data) * MAX_COMPRESSION_RATIO)
    limit = min(MAX_DECOMPRESSED_BYTES if max_bytes is None else max_bytes, honest_bytes)
    try:
        return _DECOMPRESSORS[codec](data, limit)
    except CorruptBatchError:
        raise
    except Exception as e:
        # Each library has its own error type, and naming these types would import all libraries.
        raise CorruptBatchError(f"the {codec.name.lower()} data cannot be decompressed: {e}") from e


def _too_large(limit: int) -> BatchTooLargeError:
    return BatchTooLargeError(f"the decompressed records exceed {limit} bytes")


def _checked(data: bytes, limit: int) -> bytes:
    if len(data) > limit:
        raise _too_large(limit)
    return data


def _uncompressed(data: bytes, level: int | None) -> bytes:
    return bytes(data)


def _compress_gzip(data: bytes, level: int | None) -> bytes:
    compressor = zlib.compressobj(zlib.Z_DEFAULT_COMPRESSION if level is None else level, wbits=_GZIP_WINDOW_BITS)
    return compressor.compress(data) + compressor.flush()


def _decompress_gzip(data: bytes, limit: int) -> bytes:
    parts: list[bytes] = []
    size = 0
    while data:  # a gzip stream may have several members
        member = zlib.decompressobj(wbits=_GZIP_WINDOW_BITS)
        parts.append(member.decompress(data, limit + 1 - size))
        size += len(parts[-1])
        if size > limit:
            raise _too_large(limit)
        if not member.eof:
            raise CorruptBatchError("the gzip data ends early")
        data = member.unused_data
    return b"".join(parts)


def _compress_snappy(data: bytes, level: int | None) -> bytes:
    """Write xerial blocks, as Kafka's Java clients do; every client reads them."""
    from cramjam import snappy

    parts = [_XERIAL_HEADER]
    for position in range(0, len(data), _XERIAL_BLOCK_BYTES):
        block = bytes(snappy.compress_raw(data[position : position + _XERIAL_BLOCK_BYTES]))
        parts += _INT32.pack(len(block)), block
    return b"".join(parts)


def _decompress_snappy(data: bytes, limit: int) -> bytes:
    if not data.startswith(_XERIAL_MAGIC):
        return _decompress_snappy_block(data, limit)
    parts: list[bytes] = []
    position = 0
    while position < len(data):
        if data.startswith(_XERIAL_MAGIC, position):  # concatenated streams repeat the header
            position += len(_XERIAL_HEADER)
            continue
        (size,) = _INT32.unpack_from(data, position)
        position += _INT32.size
        if not 0 < size <= len(data) - position:
            raise CorruptBatchError(f"a snappy block of {size} bytes does not fit in {len(data) - position}")
        parts.append(_decompress_snappy_block(data[position : position + size], limit))
        limit -= len(parts[-1])
        position += size
    return b"".join(parts)


def _decompress_snappy_block(block: bytes, limit: int) -> bytes:
    from cramjam import snappy

    # The library would allocate the announced size before it reads the data.
    size, _ = decode_uvarint(block, 0)
    if size > limit:
        raise _too_large(limit)
    if size > len(block) * _SNAPPY_MAX_RATIO:
        raise CorruptBatchError("the snappy data claims an impossible size")
    return bytes(snappy.decompress_raw(block))


def _compress_lz4(data: bytes, level: int | None) -> bytes:
    """Write independent blocks of 64 KiB, since the Java client rejects linked blocks.

    As in Kafka, the default level selects the fast compressor, and any other level the high compressor.
    """
    import lz4.frame

    if level is None or level == LZ4_DEFAULT_LEVEL:
        level = lz4.frame.COMPRESSIONLEVEL_MIN
    else:
        level = max(lz4.frame.COMPRESSIONLEVEL_MINHC, min(level, lz4.frame.COMPRESSIONLEVEL_MAX))
    compressed: bytes = lz4.frame.compress(
        data,
        compression_level=level,
        block_size=lz4.frame.BLOCKSIZE_MAX64KB,
        block_linked=False,
        store_size=False,
    )
    return compressed


def _decompress_lz4(data: bytes, limit: int) -> bytes:
    import lz4.frame

    frame = lz4.frame.LZ4FrameDecompressor()
    # The library allocates max_length in advance, so it must not exceed what the data can become.
    possible = min(limit, len(data) * _LZ4_MAX_RATIO)
    records = _checked(frame.decompress(data, max_length=possible + 1), limit)
    if not frame.eof:
        raise CorruptBatchError("the lz4 frame ends early")
    return records


def _compress_zstd(data: bytes, level: int | None) -> bytes:
    import zstandard

    return zstandard.ZstdCompressor(ZSTD_DEFAULT_LEVEL if level is None else level).compress(data)


def _decompress_zstd(data: bytes, limit: int) -> bytes:
    """Read in pieces, since a frame may omit its size or state a wrong one.

    A frame that is cut off yields fewer bytes, not an error.
    """
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_MAX_WINDOW_BYTES)
    reader = decompressor.stream_reader(data, read_across_frames=True)
    parts: list[bytes] = []
    size = 0
    while part := reader.read(_ZSTD_READ_BYTES):
        parts.append(part)
        size += len(part)
        if size > limit:
            raise _too_large(limit)
    return b"".join(parts)


_COMPRESSORS: Final[dict[Compression, Callable[[bytes, int | None], bytes]]] = {
    Compression.NONE: _uncompressed,
    Compression.GZIP: _compress_gzip,
    Compression.SNAPPY: _compress_snappy,
    Compression.LZ4: _compress_lz4,
    Compression.ZSTD: _compress_zstd,
}
_DECOMPRESSORS: Final[dict[Compression, Callable[[bytes, int], bytes]]] = {
    Compression.NONE: _checked,
    Compression.GZIP: _decompress_gzip,
    Compression.SNAPPY: _decompress_snappy,
    Compression.LZ4: _decompress_lz4,
    Compression.ZSTD: _decompress_zstd,
}
