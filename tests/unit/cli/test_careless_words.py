"""Careless options, files and values: the message names the value, what is allowed and where it was read."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commandline import hpcjobs, ok, within

import hpcjobs as package
from hpcjobs.errors import HpcJobsError
from hpcjobs.sweeps.folder import SweepFolder, remember


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ("submit --site {here} true", 4, "is a folder, not a file"),
        ("submit --site local -o constraint true", 5, "it takes a value: -o constraint=VALUE"),
        ("submit --site local --spec no.yaml true", 4, "spec file {here}/no.yaml does not exist"),
        ("submit --site local --launcher srun true", 5, "hint: known: "),
        ("submit --site local --parsable --json true", 2, "--parsable and --json exclude each other"),
        ("submit --site local --wrap hostname", 5, "submit the command: bash -c 'COMMAND'"),
        ("cancel --state RUNNING", 2, "--state chooses among jobs: add --all, or name jobs"),
        ("cancel --all --state FALED", 5, "did you mean 'FAILED'?"),
        ("submit --site local --signal-before 5 true", 5, "signal_before: '5' is not a time"),
        ("submit --site local --container none-such true", 5, "; known: none"),
        ("submit --site local --spec number.yaml", 4, "program.1: expected text, got a whole number\nhint: write"),
        ("sweep --site local --sweep high.yaml ddp", 5, "low=2 is above high=1"),
        ("sweep --site local --sweep log.yaml ddp", 5, "low=0 has no logarithm"),
        ("sweep --site local --sweep none.yaml ddp", 4, "sweep file {here}/none.yaml does not exist"),
        ("scale --site local --repeats 0 true", 2, "--repeats"),
        (
            "report jobs --site local --since yesterday",
            5,
            "--since yesterday: not a time\nhint: write how long ago: 7d",
        ),
        ("report jobs --site local --state DONE", 5, "--state DONE: not a job state"),
        ("report jobs --site local L99999", 6, "the accounting of site local has no job L99999"),
        ("report jobs --site local --csv none/x.csv", 5, "there is no folder {here}/none"),
        ("submit --site local train.p", 5, "train.py is a file, and no package with modules"),
        ("submit --site local .", 5, "program .: no such command"),
        ("submit --site local train.py,", 5, "program train.py,: no such command"),
        ("submit --site local train.py:main", 5, "program train.py:main: no such command"),
        ("cloud check --site gcp-t4 --dir none", 5, "--dir none: no Terraform file is there"),
        ("fabric --site local --dry-run --json", 5, "--dry-run and --json exclude each other"),
        ("submit --site local both", 5, "job 'wrong' of hpcjobs.yaml: program 'echo a && echo b'"),
        ("cancel 12_[x]", 5, "tasks are named as in 123_[0-3,7]"),
        ("fabric build --site local --target gpu", 2, "use auto, cpu or cuda"),
        ("drill kill-rank --site local --at-step -4", 2, "--at-step"),
        ("nodes --site local --clear n1", 6, "known: none"),
        ("jupyter --site local --token-file none.txt", 5, "No such file or directory"),
    ],
)
def test_a_careless_word_is_explained(here: Path, arguments: str, code: int, message: str) -> None:
    (here / "number.yaml").write_text("program: [ddp, 3]\n")
    (here / "high.yaml").write_text("sample: {n: 3, space: {lr: {low: 2, high: 1}}}\n")
    (here / "train.py").touch()
    if "both" in arguments:
        (here / "hpcjobs.yaml").write_text("jobs: {both: {program: train.py}, wrong: {program: 'echo a && echo b'}}\n")
    (here / "log.yaml").write_text("sample: {n: 3, space: {lr: {low: 0, high: 1, log: true}}}\n")
    answer = within(*arguments.format(here=here).split())
    assert answer.code == code, answer
    assert message.format(here=here) in answer.err, answer
    assert "[Errno" not in answer.err
    assert not (here / "runs").exists(), answer


@pytest.mark.parametrize("verb", ["submit true", "scale true", "sweep --set a=1,2 true"])
def test_a_folder_that_cannot_be_written_is_no_unforeseen_error(
    here: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    def refused(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "mkdir", refused)
    monkeypatch.setattr("hpcjobs.scaling.study.write_beside", refused)
    name, *arguments = verb.split()
    answer = within(name, "--site", "local", *arguments)
    assert answer.code in (3, 5), answer
    assert "Permission denied" in answer.err
    assert "details in" not in answer.err


def test_a_sweep_whose_folder_was_removed_is_not_suggested(here: Path) -> None:
    remember("gone", SweepFolder(here / "removed"))
    answer = within("sweep", "status", "gone")
    assert (answer.code, "did you mean" in answer.err) == (6, False), answer


def test_a_table_that_cannot_be_written_is_no_unforeseen_error(here: Path) -> None:
    (here / "x.parquet").mkdir()
    (here / "x.csv").mkdir()
    for option in ("--parquet=x.parquet", "--csv=x.csv"):
        answer = within("report", "jobs", "--site", "local", option)
        assert (answer.code, "details in" in answer.err) == (3, False), answer


def test_a_site_that_does_not_exist_is_explained_with_the_place_that_names_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCJOBS_SITE", "typo")
    answer = within("submit", "true")
    assert (answer.code, "hpcjobs: HPCJOBS_SITE: no site 'typo'" in answer.err) == (4, True), answer


def test_a_rank_that_printed_nothing_is_named(here: Path) -> None:
    assert hpcjobs("submit", "--site", "local", "--wait", "echo", "good").code == 0
    answer = hpcjobs("logs", "--rank", "7")
    assert (answer.out, "has no line for --rank 7" in answer.err) == ("", True), answer


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: package.plan(["true"], site="local", nodez=2), "'nodez' is not known"),
        (lambda: package.plan(["true"], site="local", env=["A=1"]), "env is a mapping"),  # type: ignore[arg-type]
        (lambda: package.plan(["true"], site="local", time=90), "time: expected text, got a whole number"),
        (lambda: package.submit("true"), "submit takes a plan"),  # type: ignore[arg-type]
        (lambda: package.find(999), "no job 999"),
        (lambda: package.grid(lr=0.1), "a list, not 0.1"),  # type: ignore[arg-type]
        (lambda: package.grid(lr="abc"), "a list, not 'abc'"),
        (lambda: package.sweep("ddp", {"lr": [1]}, site="local"), "points are a list of mappings"),  # type: ignore[arg-type]
        (lambda: package.sweep(print, {"lr": [1]}, site="local"), "points are a list of mappings"),  # type: ignore[arg-type]
        (lambda: package.sweep("ddp", [1, 2], site="local"), "points are a list of mappings"),  # type: ignore[list-item]
    ],
)
def test_a_careless_call_in_python_is_explained(here: Path, call: Callable[[], object], message: str) -> None:
    with pytest.raises(HpcJobsError) as refused:
        call()
    assert message in str(refused.value)


def test_what_submit_refuses_on_this_machine_no_other_verb_calls_possible(here: Path) -> None:
    for options in (("-c", "9999"), ("--mem", "9999G"), ("--gpus-per-node", "99")):
        answer = within("submit", "--site", "local", *options, "true")
        assert answer.code == 5
        refusal = answer.err.partition("hpcjobs: ")[2].splitlines()[0]
        assert "this machine has" in refusal
        for verb in (("submit", "--test-only"), ("where",)):
            placed = within(*verb, "--site", "local", *options, "true")
            assert placed.code != 0, placed
            assert refusal.rpartition("this machine has")[2] in placed.out


@pytest.mark.parametrize(
    ("verb", "codes"),
    [("ps", {0, 141}), ("sites", {0, 141}), ("show L1", {0, 141}), ("wait L1", {1, 141}), ("wait --json L1", {1, 141}),
     ("submit --help", {0, 141}), ("submit --site local --mem 50 true 2>&1", {141})],
)  # fmt: skip
def test_a_reader_that_has_left_makes_no_success_of_what_was_not_done(here: Path, verb: str, codes: set[int]) -> None:
    assert within("submit", "--site", "local", "--wait", "false").code == 1
    reader, writer = os.pipe()
    os.close(reader)
    arguments, both, _ = verb.partition(" 2>&1")
    with os.fdopen(writer, "w") as pipe:
        command = [sys.executable, "-m", "hpcjobs", *arguments.split()]
        environ = {"PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}  # also without a locale
        done = subprocess.run(command, stdout=pipe, stderr=pipe if both else subprocess.PIPE, text=True, env=environ)
    assert done.returncode in codes, done
    assert "Traceback" not in (done.stderr or "")
    assert len(ok("ps", "-a", "--json").json) == 1


def test_tables_and_pages_that_cannot_be_written_are_named(here: Path) -> None:
    program = 'echo \'{"loss": 1}\' > "$HPCJOBS_RUN_DIR/summary.json"'
    ok("sweep", "run", "--site", "local", "--name", "s", "--wait", "--set", "lr=1,2", "--", "sh", "-c", program)
    (here / "folder").mkdir()
    (here / "file").touch()
    for arguments, name in (
        (("sweep", "results", "s", "--csv", "none/x.csv"), "none/x.csv: No such file or directory"),
        (("sweep", "results", "s", "--parquet", "none/x.parquet"), "none/x.parquet: No such file or directory"),
        (("sweep", "results", "s", "--csv", "folder"), "folder: Is a directory"),
        (("report", "sweep", "s", "-O", "file"), "file: File exists"),
    ):
        answer = within(*arguments)
        assert (answer.code, f"{here}/{name}" in answer.err) == (3, True), answer
    rows = ok("sweep", "results", "s", "--csv", "out.csv", "--json").json
    assert [row["measured"]["loss"] for row in rows] == [1, 1]
    assert (here / "out.csv").read_text().count("\n") == 3


def test_the_ids_that_slurm_prints_for_tasks_are_understood(here: Path) -> None:
    assert within("submit", "--site", "local", "--array", "0-2", "--wait", "false").code == 1
    assert [record["job_id"] for record in within("wait", "--json", "L1_[0,2]").json] == ["L1_0", "L1_2"]
    assert ok("show", "L1_[1]", "--json").json["entry"]["task"] == 1
    assert "job L1_2  false: FAILED" in ok("why", "L1_[2]").out
    assert "L1_[0,2] names 2 jobs, and this is for one\nhint: such as L1_0" in within("why", "L1_[0,2]").err


def test_cells_of_an_earlier_command_that_are_left_out_are_counted(here: Path) -> None:
    sweep = ("sweep", "run", "--site", "local", "--name", "s", "--wait")
    assert "no part of sweep" not in ok(*sweep, "--set", "lr=1,2", "true").err
    assert "no part of sweep" not in ok(*sweep, "--set", "lr=1,2,3", "true").err
    assert "2 cells of an earlier command are no part of sweep s any more" in ok(*sweep, "--set", "lr=3", "true").err


def test_why_says_that_hpcjobs_itself_ended_a_job_without_progress(here: Path) -> None:
    submit = ("submit", "--site", "local", "--launcher", "spawn", "--retries", "preempt=1", "--wait")
    assert within(*submit, "bash", "-c", "exit 85").code == 85
    assert "; hpcjobs ended: " in ok("why", "L1").out
