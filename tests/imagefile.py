"""An image's file as far as a submission looks into it, for tests without Apptainer."""

from __future__ import annotations

import struct
from pathlib import Path

_DATA, _SIZE = 32768, 4096


def write_image(path: Path, *, build: bytes = b"1") -> Path:
    """A SIF file of 36 KiB with one partition that begins like squashfs; ``build`` tells one from another."""
    table = 128
    header = struct.pack(
        "<32s10s3s3s16s8q", b"#!/usr/bin/env run-singularity\n", b"SIF_MAGIC\0", b"01\0", b"02\0", build, 1, 2, 47, 48,
        table, 585 * 48, _DATA, _SIZE,
    )  # fmt: skip
    entry = struct.pack("<i?IIIqqqqqqq128s384s", 0x4004, True, 1, 1, 0, _DATA, _SIZE, _SIZE, 1, 1, 0, 0, b"rootfs", b"")
    path.write_bytes((header + entry).ljust(_DATA, b"\0") + b"hsqs".ljust(_SIZE, b"\0"))
    return path
