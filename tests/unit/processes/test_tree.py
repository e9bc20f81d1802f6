"""Ending processes, on every build of Python."""

from __future__ import annotations

import os
import subprocess
import time

import pytest

from hpcjobs.processes import tree


def test_processes_are_awaited_where_python_was_built_without_pidfd_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conda's are: they are built against old kernel headers."""
    monkeypatch.delattr(os, "pidfd_open")
    with subprocess.Popen(["sleep", "600"]) as child:
        began = time.monotonic()
        tree.end(lambda: [] if child.poll() is not None else [child.pid], grace_s=20)
        assert child.returncode == -15
        assert time.monotonic() - began < 15
