"""Where tests on a sandbox keep their files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from waiting import eventually


@contextmanager
def shared_folder() -> Iterator[Path]:
    """A fresh folder that every host of a sandbox sees: /tmp and /var/tmp are each host's own.

    An ordinary user has no sandbox, and the folder is a temporary one. A job that is ending may
    still write while the folder is removed, so that it is removed until it is gone.
    """
    folder = Path(tempfile.mkdtemp(prefix="hpcjobs-tests-", dir="/var/lib" if os.geteuid() == 0 else None))

    def is_removed() -> bool:
        shutil.rmtree(folder, ignore_errors=True)
        return not folder.exists()

    try:
        yield folder
    finally:
        eventually(is_removed, what=f"the removal of {folder}")
