"""Writing files that other processes watch: beside, then renamed, so that nobody reads half a file; and the cache."""

from __future__ import annotations

import os
from pathlib import Path


def cache_dir() -> Path:
    """``$XDG_CACHE_HOME/hpcjobs``: what may be lost at any time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "hpcjobs"


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
