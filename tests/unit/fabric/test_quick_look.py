"""The look before a job, and the full one, keep their time, whatever a node's programs do."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from hpcjobs.fabric import check
from hpcjobs.fabric.check import HostGroup
from hpcjobs.fabric.verdict import Findings, NodeMeasurements


class Hanging(HostGroup):
    """A node on which neither the CUDA and MPI program nor an all-reduce ends."""

    def module(self, hosts: Sequence[str], name: str, *arguments: str, mpi: str | None) -> list[str]:
        hangs = name.endswith("matmul") or "--over" in arguments
        return ["sleep", "600"] if hangs else super().module(hosts, name, *arguments, mpi=mpi)


def test_a_program_that_does_not_end_is_ended_in_time_and_what_was_measured_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "QUICK_S", check.LEAVING_S + 4)
    here = Hanging(("here",), srun=False, mpi=None, cpus_per_task=1, interface=None, suffix="")
    began = time.monotonic()
    result = check.check(here, tmp_path, quick=True, tolerance=1.0)
    assert time.monotonic() - began < 2 * check.QUICK_S
    (note,) = result.notes
    assert note.startswith("products not measured: did not end in ")
    (node,) = result.nodes
    assert node.failures == []
    assert node.values["memory_bytes_per_s"] > 0


def test_all_reduces_that_do_not_end_share_the_time_that_is_left_and_the_report_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over many nodes of few cores, where torch alone takes minutes to load."""
    monkeypatch.setattr(check, "find_spec", lambda package: True)
    hosts = ("one", "two")
    place = Hanging(hosts, srun=False, mpi=None, cpus_per_task=1, interface=None, suffix="")
    result = Findings([NodeMeasurements(host) for host in hosts])
    began = time.monotonic()
    check.measure_allreduce(place, result.nodes, result, tmp_path, until=began + 3)
    assert time.monotonic() - began < 120  # the programs themselves take 600 s
    assert [note.partition(": did not end in")[0] for note in result.notes] == [
        f"all-reduce of {package} over 2 nodes not measured" for package in ("torch", "horovod")
    ]
