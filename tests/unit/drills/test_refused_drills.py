"""Drills that cannot be done are refused before anything is submitted."""

from __future__ import annotations

import pytest

from hpcjobs.drills.drill import drill
from hpcjobs.errors import RequestError


@pytest.mark.parametrize(("fault", "site"), [("kill-rank", "tu-hpc"), ("preempt", "local")])
def test_only_a_preemption_under_slurm_is_done_by_a_partition(fault: str, site: str) -> None:
    with pytest.raises(RequestError, match="--by compute: only preempt"):
        drill(fault, site=site, by="compute")


def test_an_unknown_fault_is_answered_with_those_there_are() -> None:
    with pytest.raises(RequestError, match="no fault 'flood'") as refused:
        drill("flood", site="local")
    assert refused.value.hint is not None
    assert "kill-rank" in refused.value.hint
