"""A study is submitted once, whatever stops its submitter, and only of one code."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import ok
from msgspec.structs import replace

from hpcjobs.errors import RequestError
from hpcjobs.job.models import Plan
from hpcjobs.run.folder import SUBMITTED
from hpcjobs.run.handle import JobHandle
from hpcjobs.run.index import entries
from hpcjobs.run.submit import submit
from hpcjobs.run.wait import wait
from hpcjobs.scaling import measure, study
from hpcjobs.scaling.analysis import analyse
from hpcjobs.scaling.measure import missing
from hpcjobs.scaling.runs import mixtures, read_runs
from hpcjobs.scaling.study import Mode, Point, Size, Study
from hpcjobs.scheduler.connect import connect

FILE = Path("s.study.json")
TWO = (Size(nodes=1, ntasks_per_node=1), Size(nodes=1, ntasks_per_node=2))
ASKED = Study(name="s", site="local", mode="strong", program=("true",), repeats=3, sizes=TWO)


@pytest.fixture(autouse=True)
def machine(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two CPUs with a queue of its own, which is empty again at the end."""
    monkeypatch.setenv("HPCJOBS_LOCAL_CPUS", "2")
    yield
    local = connect("local", None)
    local.cancel({record.job_id.partition("_")[0] for record in local.queue()})
    wait(entries(), timeout_s=60)


def test_all_repeats_of_a_size_are_one_array_and_every_run_has_its_row() -> None:
    done = measure.measure(ASKED, FILE)
    assert [entry.array for entry in entries()] == ["1,2,3", "1,2,3"]
    wait(entries(), timeout_s=120)
    runs = read_runs(done)
    assert runs["state"].to_list() == ["COMPLETED"] * 6
    assert runs["job_id"].n_unique() == 6
    assert {Path(folder).parent for folder in runs["run_dir"]} == {Path(entry.run_dir) for entry in entries()}
    assert measure.measure(ASKED, FILE).points == done.points
    assert len(entries()) == 2


def test_what_is_missing_is_asked_for_size_by_size_or_one_by_one_repeat_by_repeat() -> None:
    first = Point(size=TWO[0], repeat=1, job_id="1", run_dir="/r")
    lacking = replace(ASKED, points=(first,))
    assert list(missing(lacking)) == [(TWO[0], (2, 3)), (TWO[1], (1, 2, 3))]
    one_by_one = missing(replace(lacking, repeats=2, one_at_a_time=True))
    assert list(one_by_one) == [(TWO[1], (1,)), (TWO[0], (2,)), (TWO[1], (2,))]


class Stopped(Exception):
    """The submitter was killed."""


@pytest.mark.parametrize("heard", [True, False], ids=["after the job was taken", "before it was sent"])
def test_a_submitter_that_is_killed_leaves_a_study_that_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    taken: list[JobHandle] = []

    def killed(plan: Plan) -> JobHandle:
        if taken and not heard:
            raise Stopped
        taken.append(submit(plan))
        if len(taken) == 2:
            (plan.run_dir / SUBMITTED).unlink()  # killed between the scheduler's answer and this file
            raise Stopped
        return taken[-1]

    with monkeypatch.context() as patch:
        patch.setattr(measure, "submit", killed)
        with pytest.raises(Stopped):
            measure.measure(ASKED, FILE)
    assert [point.job_id is None for point in study.read(FILE).points] == [False] * 3 + [True] * 3
    done = measure.measure(ASKED, FILE)
    assert len(entries()) == 2
    assert [point.job_id for point in done.points] == [f"{e.job_id}_{n}" for e in entries() for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("mode", "program", "efficiency"),
    [("weak", "sleep 4", (0.7, 1.4)), ("strong", "sleep $((4 / {ranks}))", (0.6, 1.4))],
)
def test_a_program_without_a_summary_is_measured_by_its_time(
    mode: Mode, program: str, efficiency: tuple[float, float]
) -> None:
    """Perfect weak scaling takes as long at every size: its efficiency is T(1) / T(N)."""
    done = measure.measure(replace(ASKED, mode=mode, program=("sh", "-c", program), repeats=1), FILE)
    wait(entries(), timeout_s=120)
    found = analyse(read_runs(done), mode=mode)
    least, most = efficiency
    assert least <= found.groups[1].efficiency.value <= most
    assert found.unit == ("rank-runs/h" if mode == "weak" else "runs/h")


def test_a_run_that_failed_is_measured_again_and_the_others_stay() -> None:
    """The program fails where a file says so."""
    program = ("sh", "-c", 'test "$SLURM_ARRAY_TASK_ID" != 2 || test -e mended')
    asked = replace(ASKED, program=program, sizes=TWO[:1])
    before = measure.measure(asked, FILE)
    wait(entries(), timeout_s=120)
    Path("mended").touch()
    after = measure.measure(asked, FILE)
    kept = {point.repeat: point.job_id for point in before.points if point.repeat != 2}
    assert {point.repeat: point.job_id for point in after.points if point.repeat != 2} == kept
    assert len(after.points) == 3
    assert len(entries()) == 2


def test_a_study_goes_on_with_the_code_it_began_with_or_says_that_it_does_not() -> None:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], check=True, capture_output=True)

    git("init", "-q")
    Path("train.py").write_text("print(1)\n")
    git("add", "train.py")
    git("commit", "-qm", "one")
    asked = replace(ASKED, repeats=1, sizes=TWO[:1])
    measure.measure(asked, FILE)
    Path("train.py").write_text("print(2)\n")
    further = replace(asked, sizes=TWO)
    with pytest.raises(RequestError, match=r"the code is \w{12} \+ patch \w{8}, but runs of s were made with \w{12}\n"):
        measure.measure(further, FILE)
    assert len(entries()) == 1
    done = measure.measure(further, FILE, allow_mixed=True)
    wait(entries(), timeout_s=120)
    assert any(told.startswith("code versions: ") for told in mixtures(read_runs(done)))


GPUS = replace(ASKED, site="a10g-box", sizes=tuple(Size(nodes=1, ntasks_per_node=n) for n in (1, 2, 4)))


def planned(asked: Study, monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """The plans that a study would submit."""
    plans: list[Plan] = []

    def stop(plan: Plan) -> JobHandle:
        raise Stopped

    for size in asked.sizes:
        wanted = replace(asked, sizes=(size,), repeats=1)
        with monkeypatch.context() as patch:
            patch.setattr(measure, "submit", lambda plan: plans.append(plan) or stop(plan))
            with pytest.raises(Stopped):
                measure.measure(wanted, Path(f"{size.ranks}.study.json"))
    return plans


def test_every_rank_of_a_gpu_site_has_a_gpu_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The site's jobs have one GPU each, which four ranks shared."""
    assert [plan.job.resources.gpus_per_node for plan in planned(GPUS, monkeypatch)] == [1, 2, 4]


def test_a_site_without_gpus_is_asked_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [plan.job.resources.gpus_per_node for plan in planned(ASKED, monkeypatch)] == [None, None]


def test_nodes_may_be_measured_with_all_their_gpus_but_ranks_share_none() -> None:
    eight = replace(GPUS, sizes=(Size(nodes=1, ntasks_per_node=8),))
    with pytest.raises(RequestError, match=r"gpus_per_node=8 .* has 4"):
        measure.measure(eight, FILE)
    with pytest.raises(RequestError, match="4 ranks on a node would share 2 GPUs"):
        measure.measure(replace(GPUS, options={"gpus_per_node": 2}), FILE)
    assert not FILE.exists()


def test_the_whole_study_has_the_launcher_and_the_environment_that_were_asked_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ok("scale", "--site", "local", "--name", "s", "--ntasks-per-node", "1,2", "--repeats", "1", "--launcher", "spawn",
       "--env", "COLOUR=blue", "--wait", "sh", "-c", 'test "$COLOUR" = blue')  # fmt: skip
    known = study.read(FILE)
    assert (known.launcher, known.env) == ("spawn", {"COLOUR": "blue"})
    with pytest.raises(RequestError, match="holds another study"):
        measure.measure(replace(known, env={}), FILE)
