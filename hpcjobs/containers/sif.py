"""Checks whether a file is an Apptainer image (SIF) and complete, and identifies it.

Layout: a header of 128 bytes, then descriptors of 585 bytes each, then the data they point to (SIF 1.x).
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

from hpcjobs.errors import ConfigError

MAGIC = b"SIF_MAGIC\0"
_HEADER = struct.Struct("<32s10s3s3s16s8q")
"""Launch line, magic, version, architecture, id, made, changed, free and all descriptors, then offset and size of
descriptors and of data."""
_DESCRIPTOR = struct.Struct("<i?IIIqqqqqqq128s384s")
_PARTITION, _SQUASHFS = 0x4004, b"hsqs"
_HEAD_BYTES = 64 << 10
"""Bytes at the beginning that differ between any two builds: the header's id and times, the table of contents."""


def check_whole(path: Path) -> None:
    """Refuse a file that no runtime could start.

    Raises:
        ConfigError: no SIF file, shorter than its header states, or without a root file system at its place.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(_HEADER.size)
        if len(head) < _HEADER.size or head[32:42] != MAGIC:
            raise ConfigError(f"image {path}: no SIF file; it begins with {head[:16]!r}", hint="build or copy it again")
        *_, count, table, table_size, data, data_size = _HEADER.unpack(head)
        if size < max(table + table_size, data + data_size):
            raise ConfigError(
                f"image {path}: cut off: {data + data_size:,} bytes by its own header, {size:,} are there",
                hint="the copy or the build did not come to its end: do it again",
            )
        file.seek(table)
        entries = file.read(min(count, 256) * _DESCRIPTOR.size)
        for entry in _DESCRIPTOR.iter_unpack(entries[: len(entries) // _DESCRIPTOR.size * _DESCRIPTOR.size]):
            kind, used, offset = entry[0], entry[1], entry[5]
            if used and kind == _PARTITION:
                file.seek(offset)
                if file.read(4) == _SQUASHFS:
                    return
    raise ConfigError(f"image {path}: damaged: no squashfs file system is where its table says", hint="build it again")


def fingerprint(path: Path) -> str:
    """Identifier of one build of an image, 16 hex digits, without reading gigabytes.

    Hash of the size and the first 64 KiB: the header with the image's id and times, the table with each part's times.
    The job script computes the same by stat, head and sha256sum.
    """
    with path.open("rb") as file:
        head = f"{os.fstat(file.fileno()).st_size}\n".encode() + file.read(_HEAD_BYTES)
    return hashlib.sha256(head).hexdigest()[:16]


def sha256(path: Path) -> str:
    """The SHA-256 of the whole file, 64 hex digits."""
    with path.open("rb") as file:
        digest = hashlib.sha256()
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
