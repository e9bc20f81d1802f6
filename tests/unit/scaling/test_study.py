"""A study is submitted once, whatever stops its submitter, and only of one code."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from commandline import ok, within
from msgspec.structs import replace
from scripted_slurm import answer

from hpcjobs.errors import ConfigError, RequestError
from hpcjobs.job.models import Plan
from hpcjobs.record import SUBMITTED
from hpcjobs.run.index import entries
from hpcjobs.run.job_files import output_dir
from hpcjobs.run.progress import all_monitor_files
from hpcjobs.run.submit import JobHandle, hand_over
from hpcjobs.run.wait import wait
from hpcjobs.scaling import study
from hpcjobs.scaling.analysis import analyse
from hpcjobs.scaling.runs import find_mixtures, read_runs
from hpcjobs.scaling.study import Mode, Size, Study
from hpcjobs.scaling.study_sweep import define, list_runs, submit_study
from hpcjobs.scheduler.base import Scheduler, connect

FILE = Path("s.study.json")
TWO = (Size(nodes=1, ntasks_per_node=1), Size(nodes=1, ntasks_per_node=2))
STUDY = Study(name="s", site="local", mode="strong", program=("true",), repeats=3, sizes=TWO)


@pytest.fixture(autouse=True)
def machine(here: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two CPUs with a queue of its own, which is empty again at the end."""
    monkeypatch.setenv("HPCJOBS_LOCAL_CPUS", "2")
    yield
    local = connect("local", None)
    local.cancel({record.job_id.partition("_")[0] for record in local.queue()})
    wait(entries(), timeout_s=300)


def test_all_repeats_of_a_size_are_one_array_and_every_run_has_its_row() -> None:
    done = submit_study(STUDY, FILE)
    assert [entry.array for entry in entries()] == ["0-2", "0-2"]
    wait(entries(), timeout_s=300)
    runs = read_runs(done)
    assert runs["state"].to_list() == ["COMPLETED"] * 6
    assert runs["job_id"].n_unique() == 6
    assert runs["run_dir"].n_unique() == 6
    assert submit_study(STUDY, FILE).points == done.points == study.read(FILE).points
    assert len(entries()) == 2


def test_a_study_is_a_sweep_that_its_verbs_show() -> None:
    ok("scale", "--site", "local", "--name", "s", "--repeats", "1", "--wait", "sh", "-c", "echo {repeat}")
    (run,) = list_runs(study.read(FILE))
    assert run.job_dir is not None
    assert run.job_id is not None
    assert output_dir(Path(run.job_dir), run.job_id).resolve() == Path(run.run_dir)
    status = ok("sweep", "status", "study-s", "--json").json
    assert status["states"] == {"COMPLETED": 1}
    (row,) = ok("sweep", "results", "study-s", "--json").json
    params = row["params"]
    assert (params["param.nodes"], params["ranks"], params["repeat"]) == (1, 1, 1)
    assert Path(row["log"]).read_text() == "1\n"


def test_a_study_that_the_scheduler_refused_does_not_stand_in_the_way_of_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = tmp_path / "slurm"
    answers.mkdir()
    for command in ("squeue", "sacct", "sinfo"):
        answer(answers, command, ":")
    answer(answers, "sbatch", "echo 'sbatch: error: Invalid account' >&2; exit 1")
    answer(answers, "scontrol", "echo 'ClusterName = x'")
    monkeypatch.setenv("PATH", f"{answers}:{os.environ['PATH']}")
    site = tmp_path / "c.yaml"
    site.write_text("{partitions: {main: {nodes: 2, node: {cpus: 4, mem: 8G}}}, node_local: []}\n")
    for account in ("wrong", "wrong2"):
        refused = within("scale", "--site", str(site), "-A", account, "--name", "s", "true")
        assert (refused.code, "Invalid account" in refused.err) == (7, True), refused


@pytest.mark.parametrize("option", ["--nodes", "--ntasks-per-node"])
def test_a_size_that_is_no_count_is_named_with_its_option(option: str) -> None:
    assert (
        f"{option} 'two': write counts such as 1,2,4" in within("scale", "--site", "local", option, "two", "true").err
    )


def test_one_at_a_time_every_run_waits_for_the_one_before_repeat_by_repeat() -> None:
    one_by_one = replace(STUDY, repeats=2, one_at_a_time=True, program=("sleep", "0.2"))
    done = submit_study(one_by_one, FILE)
    assert [(run.size.ranks, run.repeat) for run in done.points] == [(1, 1), (2, 1), (1, 2), (2, 2)]
    further = submit_study(replace(one_by_one, repeats=3), FILE)
    wait(entries(), timeout_s=300)
    runs = read_runs(further).sort("repeat", "ranks")
    assert [(run.size.ranks, run.repeat) for run in further.points[4:]] == [(1, 3), (2, 3)]
    times = [json.loads((Path(folder) / "state.json").read_text()) for folder in runs["run_dir"]]
    assert all(before["ended"] <= after["started"] for before, after in pairwise(times))


def test_sizes_and_repeats_are_added_and_those_not_named_again_stay() -> None:
    once = replace(STUDY, repeats=1)
    first = submit_study(replace(once, sizes=TWO[:1]), FILE)
    second = submit_study(replace(once, sizes=TWO[1:], repeats=2), FILE)
    assert second.points[0] == first.points[0]
    assert [(run.size.ranks, run.repeat) for run in second.points] == [(1, 1), (2, 1), (2, 2)]


def test_a_size_below_the_smallest_one_would_change_the_batch_of_the_others() -> None:
    program = ("true", "--batch-size", "8")
    submit_study(replace(STUDY, sizes=TWO[1:], repeats=1, program=program), FILE)
    with pytest.raises(RequestError, match=r"runs of 1x2 .* had a --batch-size of 8; with 1x1 .* it would be 4"):
        submit_study(replace(STUDY, repeats=1, program=program), FILE)
    assert len(entries()) == 1


@pytest.mark.parametrize(
    "spelling",
    [("--batch_size=8",), ("--batch-size=8",), ("--batch_size", "8"), ("--batch-size", "2", "--batch-size=8")],
)
def test_the_batch_is_divided_in_every_spelling_of_its_option(spelling: tuple[str, ...]) -> None:
    ok("scale", "--site", "local", "--name", "s", "--repeats", "1", "--ntasks-per-node", "1,2", "--wait",
       "sh", "-c", 'printf "%s\\n" "$*"', "sh", *spelling)  # fmt: skip
    written = {row["params"]["ranks"]: Path(row["log"]).read_text().split("\n")[0]
               for row in ok("sweep", "results", "study-s", "--json").json}  # fmt: skip
    last = spelling[-1]
    assert written[1].endswith(last)
    assert written[2].endswith(last.replace("8", "4"))


@pytest.mark.parametrize("spelling", [("--train_batch_size=8",), ("data.batch_size=8",), ("-b", "8"), ("--bs", "8")])
def test_an_option_that_may_be_a_batch_size_is_named_as_not_divided(spelling: tuple[str, ...]) -> None:
    started = ok("scale", "--site", "local", "--name", "s", "--repeats", "1", "true", *spelling)
    assert f"{spelling[0]} is passed on as it is at every size" in started.err
    weak = ok("scale", "--site", "local", "--name", "w", "--weak", "--repeats", "1", "true", *spelling)
    assert "is passed on" not in weak.err


class Stopped(Exception):
    """The submitter was killed."""


@pytest.mark.parametrize("accepted", [True, False], ids=["after the job was taken", "before it was sent"])
def test_a_submitter_that_is_killed_leaves_a_study_that_goes_on_where_it_was(
    monkeypatch: pytest.MonkeyPatch, accepted: bool
) -> None:
    taken: list[JobHandle] = []

    def killed(plan: Plan, scheduler: Scheduler) -> JobHandle:
        if taken and not accepted:
            raise Stopped
        taken.append(hand_over(plan, scheduler))
        if len(taken) == 2:
            (plan.run_dir / SUBMITTED).unlink()  # killed between the scheduler's answer and this file
            raise Stopped
        return taken[-1]

    with monkeypatch.context() as patch:
        patch.setattr("hpcjobs.sweeps.submit.hand_over", killed)
        with pytest.raises(Stopped):
            submit_study(STUDY, FILE)
    assert [run.job_id is None for run in list_runs(study.read(FILE))] == [False] * 3 + [True] * 3
    done = submit_study(STUDY, FILE)
    assert len(entries()) == 2
    assert [run.job_id for run in done.points] == [f"{e.job_id}_{n}" for e in entries() for n in range(3)]


@pytest.mark.parametrize(
    ("mode", "program", "efficiency"),
    [("weak", "sleep 4", (0.7, 1.4)), ("strong", "sleep $((4 / {ranks}))", (0.6, 1.4))],
)
def test_a_program_without_a_summary_is_measured_by_its_time(
    mode: Mode, program: str, efficiency: tuple[float, float]
) -> None:
    """Perfect weak scaling takes as long at every size: its efficiency is T(1) / T(N)."""
    done = submit_study(replace(STUDY, mode=mode, program=("sh", "-c", program), repeats=1), FILE)
    wait(entries(), timeout_s=300)
    analysis = analyse(read_runs(done))
    least, most = efficiency
    assert least <= analysis.groups[1].efficiency.value <= most
    assert analysis.unit == ("rank-runs/h" if mode == "weak" else "runs/h")


def test_a_run_that_failed_is_measured_again_and_the_others_stay() -> None:
    """The program fails where a file says so."""
    program = ("sh", "-c", 'touch "$HPCJOBS_RUN_DIR/begun"; test {repeat} != 2 || test -e mended')
    request = replace(STUDY, program=program, sizes=TWO[:1])
    before = submit_study(request, FILE)
    wait(entries(), timeout_s=300)
    Path("mended").touch()
    after = submit_study(request, FILE)
    remaining = {point.repeat: point.job_id for point in before.points if point.repeat != 2}
    assert {point.repeat: point.job_id for point in after.points if point.repeat != 2} == remaining
    assert len(after.points) == 3
    assert len(entries()) == 2
    (failed,), (again,) = ([run for run in study.points if run.repeat == 2] for study in (before, after))
    wait(entries(), timeout_s=300)
    assert failed.run_dir != again.run_dir  # it resumes nothing
    assert {run.repeat: run.job_id for run in submit_study(request, FILE).points}[2] == again.job_id


def test_a_study_goes_on_with_the_code_it_began_with_or_says_that_it_does_not() -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments], check=True, capture_output=True
        )

    git("init", "-q")
    Path("train.py").write_text("print(1)\n")
    git("add", "train.py")
    git("commit", "-qm", "one")
    request = replace(STUDY, repeats=1, sizes=TWO[:1])
    submit_study(request, FILE)
    Path("train.py").write_text("print(2)\n")
    further = replace(request, sizes=TWO)
    with pytest.raises(RequestError, match=r"the code is \w{12} \+ patch \w{8}, but runs of s were made with \w{12}\n"):
        submit_study(further, FILE)
    assert len(entries()) == 1
    done = submit_study(further, FILE, allow_mixed=True)
    wait(entries(), timeout_s=300)
    assert any(answer.startswith("code versions: ") for answer in find_mixtures(read_runs(done)))


GPUS = replace(STUDY, site="a10g-box", sizes=tuple(Size(nodes=1, ntasks_per_node=n) for n in (1, 2, 4)))


def gpus_of_sizes(study: Study) -> list[int | None]:
    """GPUs per node that a study would ask for, size by size."""
    return [job.resources.gpus_per_node for job in define(study, [], None).sizes.values()]


def test_every_rank_of_a_gpu_site_has_a_gpu_of_its_own() -> None:
    """The site's jobs have one GPU each, which four ranks shared."""
    assert gpus_of_sizes(GPUS) == [1, 2, 4]


def test_a_site_without_gpus_is_asked_for_none() -> None:
    assert gpus_of_sizes(STUDY) == [None, None]


def test_nodes_may_be_measured_with_all_their_gpus_but_ranks_share_none() -> None:
    eight = replace(GPUS, sizes=(Size(nodes=1, ntasks_per_node=8),))
    with pytest.raises(RequestError, match=r"gpus_per_node=8 .* has 4"):
        submit_study(eight, FILE)
    with pytest.raises(RequestError, match="4 ranks on a node would share 2 GPUs"):
        submit_study(replace(GPUS, options={"gpus_per_node": 2}), FILE)
    assert not FILE.exists()


def test_every_run_has_the_launcher_and_the_environment_of_the_study() -> None:
    ok("scale", "--site", "local", "--name", "s", "--ntasks-per-node", "1,2", "--repeats", "1", "--launcher", "spawn",
       "--env", "COLOUR=blue", "--wait", "sh", "-c", 'test "$COLOUR" = blue')  # fmt: skip
    known = study.read(FILE)
    assert (known.launcher, known.env) == ("spawn", {"COLOUR": "blue"})
    with pytest.raises(RequestError, match="holds another study"):
        submit_study(replace(known, env={}), FILE)


def test_a_study_whose_runs_were_removed_says_where_they_were_and_is_measured_again() -> None:
    """A scratch file system deletes what is old; the report said that no run had ended yet."""
    once = replace(STUDY, repeats=1, sizes=TWO[:1])
    folder = Path(submit_study(once, FILE).folder or "")
    wait(entries(), timeout_s=300)
    shutil.rmtree(folder)
    with pytest.raises(ConfigError, match=f"the runs of study s are not in {folder}"):
        read_runs(study.read(FILE))
    again = submit_study(once, FILE)
    assert Path(again.folder or "") != folder
    assert len(list_runs(again)) == 1


def test_show_has_what_a_run_measured() -> None:
    """The run writes into the folder of its cell, and not into that of the array's task."""
    summary = """cd "$HPCJOBS_RUN_DIR"; echo '{"throughput": {"value": 7}}' > summary.json; echo x > monitor.jsonl"""
    (run,) = submit_study(replace(STUDY, repeats=1, sizes=TWO[:1], program=("sh", "-c", summary)), FILE).points
    wait(entries(), timeout_s=300)
    assert ok("show", run.job_id or "", "--json").json["results"] == {"throughput.value": 7}
    assert [str(path.resolve()) for path in all_monitor_files(entries()[0])] == [f"{run.run_dir}/monitor.jsonl"]


@pytest.mark.parametrize(
    ("written", "rate"),
    [
        ('{"throughput": {"value": 7, "unit": "atoms/s"}}', 7.0),
        ('{"throughput": {"value": "7", "unit": "atoms/s"}}', None),
        ('{"throughput": 7}', None),
        ("[7]", None),
        ("", None),
    ],
)
def test_a_summary_that_another_program_wrote_is_read_or_named_as_unusable(written: str, rate: float | None) -> None:
    program = f"""echo '{written}' > "$HPCJOBS_RUN_DIR/summary.json"; [ {{repeat}} = 1 ] || exit 0
        echo '{{"throughput": {{"value": 2, "unit": "atoms/s"}}}}' > "$HPCJOBS_RUN_DIR/summary.json" """
    ok("scale", "--site", "local", "--name", "s", "--repeats", "2", "--wait", "sh", "-c", program)
    answer = within("report", "scaling", "s", "--json")
    assert answer.code == 0, answer
    assert read_runs(study.read(FILE))["throughput"].to_list() == [2.0, rate]
    assert ("summary.json cannot be used" in answer.err) == (rate is None)
