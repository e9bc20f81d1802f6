"""A sweep cut into arrays: the fewest there can be, within every limit, with the throttle held over all."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from commandline import within
from msgspec.structs import replace

import hpcjobs
from hpcjobs.errors import RequestError, SchedulerDownError, SchedulerError
from hpcjobs.processes.programs import Result
from hpcjobs.sweeps.submit import Cut, Limits, cuts, largest_array, parse_config, read_limits

CONFIG = """Configuration data as of 2026-11-21T12:00:00
MaxArraySize            = 1001
MaxJobCount             = 20000
SchedulerParameters     = bf_continue,max_array_tasks=500,bf_interval=2
"""


def test_the_index_is_what_maxarraysize_bounds() -> None:
    assert parse_config(CONFIG.replace("max_array_tasks=500,", "")) == Limits(1001, 19999)
    assert parse_config(CONFIG) == Limits(500, 19999)
    assert parse_config(CONFIG, jobs=300) == Limits(500, 300)


def test_a_controller_that_does_not_answer_is_quoted() -> None:
    job = replace(hpcjobs.plan(["true"], site="local").job, scheduler="slurm")
    silent = Result(1, "", "Unable to contact slurm controller")
    with pytest.raises(SchedulerError, match="Unable to contact"):
        read_limits(job, max_submit_jobs=None, runner=lambda argv, **_: silent)


@pytest.mark.parametrize("tasks", [1, 2, 999, 1000, 1001, 1002, 2003, 10_000])
@pytest.mark.parametrize("max_parallel", [None, 1, 7, 40, 500, 100_000])
@pytest.mark.parametrize("array_tasks", [10, 1001])
def test_every_cell_is_in_one_of_the_fewest_arrays_and_the_throttle_holds(
    tasks: int, max_parallel: int | None, array_tasks: int
) -> None:
    result = cuts(tasks, Limits(array_tasks), max_parallel=max_parallel)
    assert sum(cut.tasks for cut in result) == tasks
    assert len(result) == -(-tasks // array_tasks)
    assert all(1 <= cut.tasks <= array_tasks for cut in result)
    if max_parallel is not None and max_parallel < tasks:
        together = [cut.throttle or cut.tasks for cut in result]
        assert all(cut.after_previous for cut in result[1:]) or sum(together) <= max_parallel
        assert max(together) <= max_parallel


def test_few_slots_go_to_one_array_after_another_and_many_are_shared_out() -> None:
    assert cuts(2000, Limits(1000), max_parallel=4) == [Cut(1000, 4, False), Cut(1000, 4, True)]
    assert cuts(1500, Limits(1000), max_parallel=100) == [Cut(750, 50, False), Cut(750, 50, False)]


def test_an_array_leaves_room_in_the_queue_for_the_job_that_submits_the_next() -> None:
    assert [cut.tasks for cut in cuts(20, Limits(1001, 12))] == [10, 10]


def test_a_cluster_without_job_arrays_is_an_error_that_says_so() -> None:
    """MaxArraySize=0 switches them off: the sweep was cut into pieces of 0 tasks, a division by zero."""
    without = CONFIG.replace("max_array_tasks=500,", "").replace("1001", "0")
    with pytest.raises(
        RequestError, match="has no job arrays, which sweeps and scaling studies need: MaxArraySize is 0"
    ):
        parse_config(without)


@pytest.mark.parametrize("most", [0, 1, 2, 3, 5, 8, 99])
def test_the_largest_array_that_the_queue_takes_is_found_with_few_questions(most: int) -> None:
    plan = hpcjobs.plan(["true"], site=replace(hpcjobs.load_site("sandbox"), node_local=()))
    sizes: list[int] = []

    def sbatch(argv: Sequence[str], **_: object) -> Result:
        (last,) = (int(option.removeprefix("--array=0-")) for option in argv if option.startswith("--array="))
        sizes.append(last + 1)
        return Result(0 if last < most else 1, "", "")

    assert largest_array(plan, 8, runner=sbatch) == min(most, 8)
    assert len(sizes) <= 4


@pytest.mark.parametrize(
    "lost", ["sbatch: error: Socket timed out on send/recv operation", "Unable to contact slurm controller"]
)
def test_a_controller_that_is_away_refuses_no_array(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """A lost answer was taken for 'does not fit', and the sweep was cut into ever smaller arrays."""
    plan = hpcjobs.plan(["true"], site=replace(hpcjobs.load_site("sandbox"), node_local=()))
    monkeypatch.setattr("hpcjobs.scheduler.slurm.client._PAUSES_S", (0.0, 0.0))
    answers = iter([Result(1, "", lost), Result(0, "", "")])
    assert largest_array(plan, 1, runner=lambda argv, **_: next(answers)) == 1
    with pytest.raises(SchedulerDownError, match="no answer from Slurm"):
        largest_array(plan, 8, runner=lambda argv, **_: Result(1, "", lost))


def test_a_batch_script_is_no_program_of_a_cell(here: Path) -> None:
    """Its cells would run without the script."""
    (here / "site.yaml").write_text("scheduler: slurm\npartitions: {main: {nodes: 2, node: {cpus: 4, mem: 8G}}}\n")
    (here / "b.sh").write_text("#!/bin/bash\n#SBATCH -J b\necho\n")
    sweep, study = ("sweep", "run", "--set", "x=1,2"), ("scale", "--nodes", "1,2", "--metric", r"v=(\d+)")
    for verb in (sweep, (*sweep, "--dry-run"), study):
        refused = within(*verb, "--site", "./site.yaml", "b.sh")
        assert (refused.code, "a batch script is a job of its own" in refused.err) == (5, True), refused
    assert "No such option: --wrap" in within(*sweep, "--site", "./site.yaml", "--wrap", "hostname").err
    assert not (here / "runs").exists()


def test_a_sweep_whose_name_is_an_option_for_every_command_is_refused(here: Path) -> None:
    refused = within("sweep", "run", "--site", "local", "--name=-x", "--set", "i=1", "--", "true", "{i}")
    assert (refused.code, "sweep '-x': every command would take this name for an option" in refused.err) == (5, True)
    assert not (here / "runs").exists()
