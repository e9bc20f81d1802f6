"""The project file: what `submit` runs in a folder where no program is named."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml
from commandline import Answer, ok, within

import hpcjobs
from hpcjobs.site import project_file

TWO = """\
resources: {ntasks_per_node: 2, time: 1h}
env: {DATA: /data}
jobs:
  train: {program: "train.py --epochs 2", resources: {time: 2h}}
  evaluate: {program: [train.py, --only, two words], chdir: sub}
"""


@pytest.fixture
def repository(here: Path) -> Path:
    (here / ".git").mkdir()
    (here / "sub").mkdir()
    (here / "train.py").write_text("print('trained')\n")
    (here / "sub" / "train.py").write_text("print('evaluated')\n")
    return here


def write(text: str, folder: Path | None = None) -> None:
    ((folder or Path()) / project_file.FILE).write_text(text)


def explained(*arguments: str) -> dict[str, tuple[str, str]]:
    """Value and source of each setting of the job that would be submitted."""
    rows = ok("submit", "--explain", "--json", *arguments).json
    return {row["name"]: (row["value"], row["source"]) for row in rows}


def command(*arguments: str) -> list[str]:
    """What each rank of the job would run, without the Python."""
    argv: list[str] = ok("submit", "--dry-run", "--json", *arguments).json["job"]["argv"]
    return argv[2:]


def refused(*arguments: str) -> str:
    answer: Answer = within("submit", *arguments)
    assert answer.code in (4, 5), answer
    return answer.err


def test_submit_without_a_program_runs_the_job_of_the_project_file(repository: Path) -> None:
    write("program: train.py --lr '0 1'\nresources: {ntasks_per_node: 2}\n")
    assert command() == ["train.py", "--lr", "0 1"]
    assert explained()["ntasks_per_node"] == ("2", "hpcjobs.yaml")
    assert explained("--ntasks-per-node", "3")["ntasks_per_node"] == ("3", "flag")
    job_id = ok("submit", "--wait").out.split()[1]
    assert sorted(ok("logs", job_id).out.splitlines()) == ["0: trained", "1: trained"]


def test_a_job_is_run_by_its_name_with_further_arguments(repository: Path) -> None:
    write(TWO)
    settings = explained("train")
    assert settings["time"] == ("02:00:00", "hpcjobs.yaml: train")
    assert settings["ntasks_per_node"] == ("2", "hpcjobs.yaml")
    assert settings["name"] == ("train", "hpcjobs.yaml: train")
    assert settings["env.DATA"] == ("/data", "hpcjobs.yaml")
    assert command("train", "--epochs", "9") == ["train.py", "--epochs", "2", "--epochs", "9"]
    assert command("evaluate") == ["train.py", "--only", "two words"]
    assert explained("evaluate")["chdir"][0] == str(repository / "sub")
    assert hpcjobs.plan("train", "local").job.name == "train"
    message = refused()
    assert "has the jobs train, evaluate" in message
    assert "hpcjobs submit NAME" in message


def test_a_program_of_its_own_takes_nothing_but_the_site_from_the_project_file(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(TWO)
    assert "env.DATA" not in explained("train.py")
    assert "time" not in explained("hostname")
    write(TWO + "site: nowhere\n")
    assert "nowhere" in refused("train")
    assert "nowhere" in refused("hostname")
    monkeypatch.setenv("HPCJOBS_SITE", "local")
    assert "env.DATA" not in explained("train.py")


def test_the_file_is_found_from_a_folder_of_its_repository_and_not_above_it(repository: Path) -> None:
    write(TWO)
    os.chdir("sub")
    assert explained("train")["chdir"] == (str(repository), str(repository / project_file.FILE))
    assert explained("evaluate")["chdir"][0] == str(repository / "sub")
    (repository / ".git").rmdir()
    assert "no program to run" in refused()
    assert "hpcjobs init" in refused()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nodes: 2\n", "hpcjobs.yaml:1"),
        ("program: train.py\nsite: ./mine.yaml\n", "is a path"),
        ("jobs: {ddp: {program: train.py}}\n", "bundled trainer"),
        ("jobs: {a.py: {program: train.py}}\n", "begins with a letter"),
        ("jobs:\n  a: {programm: train.py}\n", "hpcjobs.yaml:2"),
        ('program: "train.py \'"\n', "No closing quotation"),
        ("name: x\n", "names no program"),
        ("- a list\n", "hpcjobs.yaml"),
    ],
)
def test_a_wrong_project_file_is_refused_with_its_line(repository: Path, text: str, problem: str) -> None:
    write(text)
    assert problem in refused()


def test_the_file_of_another_user_runs_nothing_until_it_is_trusted(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("program: train.py\n")
    if os.getuid() == 0:
        os.chown(project_file.FILE, 65534, -1)
    else:  # who may not give a file away is somebody else here
        monkeypatch.setattr(project_file, "os", SimpleNamespace(path=os.path, getuid=lambda: 65534))
    assert "is not trusted" in refused("--dry-run")
    ok("sites", "trust", project_file.FILE)
    assert command() == ["train.py"]
    write("program: train.py --changed\n")
    assert "is not trusted" in refused("--dry-run")


def test_init_writes_what_submit_then_runs(repository: Path) -> None:
    wrote = ok("init", "-t", "10", "--ntasks-per-node", "2", "--env", "A=b c", "train.py", "--lr", "0 1")
    assert "next: hpcjobs submit" in wrote.err
    assert wrote.out == Path(project_file.FILE).read_text()
    assert command() == ["train.py", "--lr", "0 1"]
    assert explained()["env.A"] == ("b c", "hpcjobs.yaml")
    again = within("init", "train.py")
    assert (again.code, "--force" in again.err) == (5, True)
    assert ok("init", "--dry-run", "other.py").out != wrote.out == Path(project_file.FILE).read_text()


def test_init_takes_the_options_of_a_batch_script(repository: Path) -> None:
    lines = "#SBATCH -N 2 -t 10\n#SBATCH --job-name=two --mem=4G --switches=1\n#SBATCH --comment 'a b'\n"
    Path("job.sh").write_text(f"#!/bin/bash\n{lines}srun hostname\n")
    content: dict[str, Any] = yaml.safe_load(ok("init", "-N", "3", "job.sh").out)
    assert content["program"] == "job.sh"
    assert content["name"] == "two"
    assert {"nodes": 3, "mem": "4G", "time": "00:10:00"}.items() <= content["resources"].items()
    jsonschema.validate(content, json.loads(ok("init", "--schema").out), jsonschema.Draft202012Validator)


def test_an_editor_is_told_what_a_project_file_may_say(here: Path) -> None:
    checker = jsonschema.Draft202012Validator(json.loads(ok("init", "--schema").out))
    assert checker.is_valid(yaml.safe_load(TWO))
    assert not checker.is_valid({"programm": "train.py"})
    assert not checker.is_valid({"jobs": {"a": {"nodes": 2}}})


def test_a_spec_file_may_have_its_program_as_a_text_too(repository: Path) -> None:
    Path("job.yaml").write_text("program: train.py --lr '0 1'\n")
    assert command("--spec", "job.yaml") == ["train.py", "--lr", "0 1"]
