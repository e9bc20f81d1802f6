"""The look before a job keeps its time, whatever a node's programs do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcjobs.fabric import check
from hpcjobs.fabric.nodes import Place


class Hanging(Place):
    """A node on which the CUDA and MPI program does not end."""

    def module(self, hosts: Sequence[str], name: str, *arguments: str, mpi: str | None) -> list[str]:
        return ["sleep", "600"] if name.endswith("matmul") else super().module(hosts, name, *arguments, mpi=mpi)


def test_a_program_that_does_not_end_is_ended_in_time_and_what_was_measured_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "QUICK_S", check.LEAVING_S + 4)
    here = Hanging(("here",), srun=False, mpi=None, cpus_per_task=1, interface=None, suffix="")
    began = time.monotonic()
    found = check.check(here, tmp_path, quick=True, tolerance=1.0)
    assert time.monotonic() - began < 2 * check.QUICK_S
    (note,) = found.notes
    assert note.startswith("products not measured: did not end in ")
    (node,) = found.nodes
    assert node.failures == []
    assert node.values["memory_bytes_per_s"] > 0
