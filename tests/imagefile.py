"""Images for tests: a recipe that needs no download, and files that look like one to a submission."""

from __future__ import annotations

import struct
from pathlib import Path

THIN = Path(__file__).resolve().parent / "data" / "images" / "thin.def"
"""Nothing but mount points."""
_TABLE, _DATA, _SIZE = 128, 32768, 4096


def write_image(path: Path, *, build: bytes = b"1") -> Path:
    """A SIF file of 36 KiB with one partition that begins like squashfs; ``build`` tells one from another."""
    launch = b"#!/usr/bin/env run-singularity\n"
    numbers = (1, 2, 47, 48, _TABLE, 585 * 48, _DATA, _SIZE)
    header = struct.pack("<32s10s3s3s16s8q", launch, b"SIF_MAGIC\0", b"01\0", b"02\0", build, *numbers)
    place = (_DATA, _SIZE, _SIZE, 1, 1, 0, 0)
    entry = struct.pack("<i?IIIqqqqqqq128s384s", 0x4004, True, 1, 1, 0, *place, b"rootfs", b"")
    path.write_bytes((header + entry).ljust(_DATA, b"\0") + b"hsqs".ljust(_SIZE, b"\0"))
    return path
