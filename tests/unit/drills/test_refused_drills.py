"""Drills that cannot be done are refused before anything is submitted."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from commandline import within
from scripted_slurm import answer
from slurm_rows import print_rows, queued_row

from hpcjobs.errors import RequestError
from hpcjobs.run.drill import drill


@pytest.mark.parametrize(("fault", "site"), [("kill-rank", "tu-hpc"), ("preempt", "local")])
def test_only_a_preemption_under_slurm_is_done_by_a_partition(fault: str, site: str) -> None:
    with pytest.raises(RequestError, match="--by compute: only preempt"):
        drill(fault, site=site, by="compute")


def test_an_unknown_fault_is_answered_with_those_there_are() -> None:
    with pytest.raises(RequestError, match="no fault 'flood'") as refused:
        drill("flood", site="local")
    assert refused.value.hint is not None
    assert "kill-rank" in refused.value.hint


def test_a_drill_whose_second_job_slurm_refuses_leaves_no_first_one(
    here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = tmp_path / "slurm"
    commands.mkdir()
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    (here / "mine.yaml").write_text("{partitions: {batch: {nodes: 2, node: {cpus: 4}}}}\n")
    job = {"JobID": 41, "JobName": "drill-alone", "State": "PENDING", "Reason": "Resources", "Partition": "batch"}
    script = f"$(head -n1 {commands}/sbatch.asked | sed 's/.* //')"
    row = queued_row(**job, NNodes=2, Submit="$(date +%s)", TimeLimit="5:00", Command=script)
    refusal = "echo 'Batch job submission failed: Job violates accounting/QOS policy' >&2; exit 1"
    answer(commands, "sbatch", f"[ $(wc -l <{commands}/sbatch.asked) = 1 ] && echo 41 && exit; {refusal}")
    answer(commands, "squeue", print_rows(row))
    answer(commands, "scancel", ":")
    done = within("drill", "timeout", "--site", "./mine.yaml")
    assert (done.code, "Job violates accounting/QOS policy" in done.err) == (7, True), done
    assert (commands / "scancel.asked").read_text() == "--quiet 41\n"


def test_a_drill_of_a_program_that_reports_no_step_says_so(here: Path) -> None:
    (here / "train.py").write_text("print('done')\n")
    answer = within("drill", "timeout", "--site", "local", "train.py")
    assert answer.code == 3, answer
    assert "has reported no step" in answer.err
    assert "hpcjobs help own_scripts" in answer.err
