"""Writing files that other processes watch: beside, then renamed, so that nobody reads half a file."""

from __future__ import annotations

import os
from pathlib import Path


def write_beside(path: Path, content: bytes | str, *, mode: int = 0o600) -> None:
    """Write ``content`` to ``path`` in one step: a reader sees the old file or the whole new one."""
    data = content if isinstance(content, bytes) else content.encode("utf-8", "surrogateescape")
    beside = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(2).hex()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
