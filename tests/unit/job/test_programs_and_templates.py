"""What a program may be called, and which variables and templates a job takes."""

from __future__ import annotations

import os
import pwd
from pathlib import Path

import pytest
from commandline import ok, within

import hpcjobs
from hpcjobs.errors import ConfigError, RequestError
from hpcjobs.job.plan import notes


@pytest.fixture
def site(here: Path) -> str:
    (here / "site.yaml").write_text(
        "{partitions: {main: {nodes: 2, node: {cpus: 4}, default: true}, gpu: {nodes: 2, node: {cpus: 4}}}, "
        "defaults: {account: ours, time: 1h}}\n"
    )
    return "./site.yaml"


def test_a_program_in_one_text_is_split_like_a_shell_line(site: str, here: Path) -> None:
    (here / "train.py").touch()
    plan = hpcjobs.plan("train.py --name 'two words' --lr 1", site=site)
    assert plan.job.argv[-5:] == ("train.py", "--name", "two words", "--lr", "1")
    assert hpcjobs.sweep("train.py --lr 1", [{"seed": 1}], site=site).definition.job.argv[-3:] == (
        "train.py",
        "--lr",
        "1",
    )
    with pytest.raises(RequestError, match="No closing quotation"):
        hpcjobs.plan("train.py 'two", site=site)


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("trian.py", "train.py"), ("train", "train.py"), ("./trian.py", "./train.py"), ("evalute", "evaluate"),
     ("jib.sbatch", "job.sbatch"), ("dddp", "ddp")],
)  # fmt: skip
def test_a_mistyped_program_is_answered_with_the_file_job_or_trainer_that_was_meant(
    here: Path, typed: str, meant: str
) -> None:
    (here / "train.py").touch()
    (here / "job.sbatch").touch()
    (here / "hpcjobs.yaml").write_text("jobs: {evaluate: {program: train.py}}\n")
    answer = within("submit", "--site", "local", typed)
    assert answer.code == 5
    assert f"hint: did you mean {meant}?" in answer.err


@pytest.mark.parametrize("command", ["dp", "fsd", "dpd"])
def test_a_command_of_the_nodes_may_resemble_a_trainer_and_the_user_is_told(site: str, command: str) -> None:
    plan = hpcjobs.plan([command], site=site)
    assert plan.job.argv == (command,)
    assert any(f"no command '{command}' on this machine" in line for line in notes(plan.job))


@pytest.mark.parametrize(
    "name", ["BASH_VERSINFO", "FUNCNEST", "EXECIGNORE", "TMOUT", "SLURM_JOB_ID", "SLURM_NNODES", "PMIX_RANK"]
)
def test_variables_that_bash_or_slurm_set_are_refused(site: str, name: str) -> None:
    with pytest.raises(RequestError, match=f"env {name} "):
        hpcjobs.plan(["true"], site=site, env={name: "1"})
    hpcjobs.plan(["true"], site=site, env={"SLURM_CPU_BIND": "none", "PMIX_MCA_psec": "native"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ job.__class__.__mro__ }}", "unsafe"),
        ("{{ in_own_group.__globals__ }}", "unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
        ("{{ job.nodes.nothing }}", "nothing"),
    ],
)
def test_a_template_of_the_folder_cannot_run_python_nor_raise_a_traceback(
    site: str, here: Path, text: str, message: str
) -> None:
    (here / "templates").mkdir()
    (here / "templates" / "own.sh.j2").write_text(f"#!/bin/bash\n{text}\n")
    with pytest.raises(ConfigError, match=message) as caught:
        hpcjobs.plan(["true"], site=site, template="own", allow_untrusted=True)
    assert "own.sh.j2:2" in caught.value.message


def test_a_template_that_takes_the_place_of_a_shipped_one_is_named(site: str, here: Path) -> None:
    assert list(notes(hpcjobs.plan(["true"], site=site).job)) == []
    (here / "templates").mkdir()
    (here / "templates" / "job.sh.j2").write_text('{% extends "shipped/job.sh.j2" %}\n')
    ok("sites", "trust")
    (note,) = notes(hpcjobs.plan(["true"], site=site).job)
    assert note.startswith(f"template {here}/templates/job.sh.j2 is used in place of")


def test_options_that_a_local_job_has_no_use_for_are_named_where_its_user_gave_them(site: str, here: Path) -> None:
    request = {"partition": "gpu", "account": "ours", "qos": "long", "constraint": "ib", "cpus_per_task": 1}
    (note,) = notes(hpcjobs.plan(["true"], site="local", **request).job)  # type: ignore[arg-type]
    assert note == (
        "partition=gpu (flag), account=ours (flag), qos=long (flag), constraint=ib (flag): no effect on site local,"
        " which is this machine alone"
    )
    assert list(notes(hpcjobs.plan(["true"], site="local", time="1h").job)) == []
    assert list(notes(hpcjobs.plan(["true"], site=site, partition="gpu", constraint="ib").job)) == []
    (here / "mine.yaml").write_text(
        "{scheduler: local, launchers: [spawn], defaults: {account: ours}, "
        "partitions: {all: {nodes: 1, node: {cpus: 4}, defaults: {qos: x}}}}\n"
    )
    assert list(notes(hpcjobs.plan(["true"], site="./mine.yaml", partition="all").job)) == []


def test_a_user_id_without_a_name_can_submit(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    monkeypatch.setenv("USER", "")
    assert hpcjobs.plan(["true"], site="local").run_dir
    assert hpcjobs.plan(["true"], site=site).run_dir
    assert os.environ["USER"] == ""


def test_a_script_without_hpcjobs_is_told_that_it_must_find_its_last_checkpoint(site: str, here: Path) -> None:
    (here / "own.py").write_text("import torch\ntorch.save({}, 'last.pt')\n")
    (here / "kit.py").write_text("import hpcjobs.runtime\n")

    def is_told(program: str, **options: str) -> bool:
        lines = notes(hpcjobs.plan([program], site=site, **options).job)
        return any("must find its last checkpoint itself" in line for line in lines)

    assert is_told("own.py", retries="on")
    assert not is_told("own.py")
    assert not is_told("kit.py", retries="on")
