"""The submitit route and the Jinja route ask Slurm for the same, and tell the tasks the same."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import stub_slurm
from msgspec.structs import replace
from submitit.slurm.slurm import _make_sbatch_string

import hpcjobs
from hpcjobs.data import data_folder
from hpcjobs.errors import RequestError
from hpcjobs.job.models import Plan
from hpcjobs.sweeps.executor import parameters

SLURM_SITES = [
    path.stem
    for path in sorted(data_folder("site_configs").glob("*.yaml"))
    if hpcjobs.load_site(path.stem).scheduler == "slurm"
]
OWN = {"signal", "output", "error", "open-mode", "job-name"}
"""Directives that submitit says itself, or that name its files."""


def directives(script: str) -> dict[str, str]:
    arguments = [
        shlex.split(line.removeprefix("#SBATCH --"))[0] for line in script.splitlines() if line.startswith("#SBATCH")
    ]
    result = (argument.partition("=") for argument in arguments)
    return {name: value for name, _, value in result if name not in OWN}


def both(site: str, folder: Path, **options: object) -> tuple[Plan, str]:
    where = replace(hpcjobs.load_site(site), node_local=(), run_root="runs")
    plan = hpcjobs.plan(["true"], site=where, chdir=folder, launcher="srun", name="submitit", **options)  # type: ignore[arg-type]
    return plan, _make_sbatch_string(command="COMMAND", folder=folder, **parameters(plan.job, folder))


@pytest.mark.parametrize("site", SLURM_SITES)
def test_both_routes_write_the_same_directives(site: str, here: Path) -> None:
    plan, script = both(site, here, nodes=2, time="90m", exclusive=True, constraint="ib", mem="1G")
    assert directives(script) == directives(plan.script)


@pytest.mark.parametrize("site", SLURM_SITES)
def test_both_routes_start_the_tasks_with_the_same_srun_arguments(site: str, here: Path) -> None:
    plan, script = both(site, here, nodes=2, ntasks_per_node=2, gpus_per_node=None)
    ours = next(line for line in plan.script.splitlines() if line.startswith("srun "))
    theirs = next(line for line in script.splitlines() if line.startswith("srun "))
    ours = ours.replace('"$SLURM_JOB_NUM_NODES"', "2").replace('"$((SLURM_JOB_NUM_NODES * 2))"', "4")
    own = {"--unbuffered", "--label"}
    assert set(re.findall(r"--[\w-]+=\S+", theirs)) - own == set(re.findall(r"--[\w-]+=\S+", ours)) - own


@pytest.mark.parametrize("site", SLURM_SITES)
def test_both_routes_prepare_the_node_and_tell_the_tasks_the_same(site: str, here: Path) -> None:
    plan, script = both(site, here, env={"GREETING": "it's\nme"})
    begin, end = "# --- software of the site\n", "|| die 'the working folder is not there on this node'\n"
    begin = begin if begin in plan.script else "# --- environment of every task\n"
    shared = plan.script[plan.script.index(begin) : plan.script.index(end) + len(end)]
    mine = [line for line in shared.splitlines() if line and "HPCJOBS_LAUNCHED_BY" not in line]
    theirs = [line for line in script.splitlines() if line and "HPCJOBS_LAUNCHED_BY" not in line]
    start = theirs.index(mine[0])
    assert theirs[start : start + len(mine)] == mine


def test_a_folder_that_no_sbatch_line_of_ours_could_hold_is_submitits_to_take(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Submitit quotes the paths of its own lines: the executor renders none."""
    folder = here / "back\\slash"
    shared = replace(hpcjobs.load_site("tu-hpc"), node_local=(), run_root=str(folder))
    stub_slurm.install(monkeypatch, here / "stubs", limit=9)
    executor = hpcjobs.executor(site=shared)
    assert Path(executor.folder) == folder / "submitit-submitit"
    where = replace(hpcjobs.load_site("local"), run_root=str(folder))
    job = hpcjobs.executor(site=where).submit(int, "3")
    assert job.result() == 3


def test_a_local_site_gives_an_executor_that_runs_here(here: Path) -> None:
    def world() -> tuple[str, str, str]:
        import os

        return os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["GREETING"]

    executor = hpcjobs.executor(site="local", ntasks_per_node=2, env={"GREETING": "it's me"})
    job = executor.submit(world)
    assert job.results() == [("0", "2", "it's me"), ("1", "2", "it's me")]
    assert (here / "runs" / "submitit-submitit").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(
    ("by_submitit", "by_hpcjobs"),
    [
        (
            {"timeout_min": 90, "mem_gb": 1.5, "tasks_per_node": 2, "slurm_partition": "main", "cpus_per_task": 2},
            {"time": "90m", "mem": "1536M", "ntasks_per_node": 2, "partition": "main", "cpus_per_task": 2},
        ),
        (
            {"slurm_time": 90, "slurm_additional_parameters": {"constraint": "ib"}, "slurm_qos": "debug"},
            {"time": "90m", "constraint": "ib", "qos": "debug"},
        ),
    ],
)
def test_names_of_submitit_ask_for_what_the_names_of_sbatch_ask_for(
    here: Path, by_submitit: dict[str, object], by_hpcjobs: dict[str, object]
) -> None:
    (here / "site.yaml").write_text("partitions: {main: {nodes: 2, node: {cpus: 8, mem: 8G}, qos: [debug]}}\n")

    def directives(options: dict[str, object]) -> dict[str, object]:
        executor = hpcjobs.executor(site="./site.yaml", slurm_array_parallelism=3, **options)
        return {name: executor.parameters.get(name) for name in ("time", "ntasks_per_node", "additional_parameters")}

    assert directives(by_submitit) == directives(by_hpcjobs)


def test_an_option_that_is_named_in_two_ways_is_refused(here: Path) -> None:
    with pytest.raises(RequestError, match="time has been given by another name too"):
        hpcjobs.executor(site="local", time="1h", timeout_min=5)
