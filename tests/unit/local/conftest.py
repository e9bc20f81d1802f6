"""A machine of two CPUs with a queue of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from .machines import Machine, until


@pytest.fixture
def machine(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("HPCJOBS_LOCAL_CPUS", "2")
    monkeypatch.setenv("HPCJOBS_LOCAL_GPUS", "0")
    made = Machine(here)
    yield made
    made.local.cancel([record.job_id.partition("_")[0] for record in made.local.queue()])
    until(lambda: not made.local.queue())


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """For jobs that never heed their end; on a busy machine others need what every user has."""
    monkeypatch.setenv("HPCJOBS_GRACE_S", "1")
