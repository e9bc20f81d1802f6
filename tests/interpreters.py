"""Other Pythons of this machine."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path


def interpreter(version: str) -> str | None:
    """A Python of ``version`` on this machine."""
    pyenv = sorted(Path(pwd.getpwuid(os.getuid()).pw_dir, ".pyenv", "versions").glob(f"{version}.*/bin/python"))
    if pyenv:
        return str(pyenv[-1])
    other = shutil.which(f"python{version}")
    works = other is not None and subprocess.run([other, "--version"], capture_output=True).returncode == 0
    return other if works else None  # a shim of pyenv may stand for none
