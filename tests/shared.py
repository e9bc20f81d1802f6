"""Where tests on a sandbox keep their files."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A fresh folder that every host of a sandbox sees: /tmp and /var/tmp are each host's own."""
    with tempfile.TemporaryDirectory(prefix="hpcjobs-tests-", dir="/var/lib") as folder:
        yield Path(folder)
