"""What the check's own steps are told of their world."""

from __future__ import annotations

import pytest

from hpcjobs.fabric.check import HostGroup

PLACE = HostGroup(("tu01", "tu02"), srun=True, mpi="pmix", cpus_per_task=1, interface=None, suffix="")


def test_steps_over_several_nodes_start_by_the_ring_of_pmix_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLURM_PMIX_FENCE", raising=False)
    assert PLACE.world(PLACE.hosts)["SLURM_PMIX_FENCE"] == "ring"
    monkeypatch.setenv("SLURM_PMIX_FENCE", "tree")
    assert "SLURM_PMIX_FENCE" not in PLACE.world(PLACE.hosts)
