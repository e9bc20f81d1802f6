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
from hpcjobs.files import config_dir
from hpcjobs.site import library

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


@pytest.fixture
def cluster(repository: Path) -> None:
    """A Slurm site of the user, ``ours``."""
    folder = config_dir() / "site_configs"
    folder.mkdir(parents=True)
    node = "{default: true, nodes: 4, node: {cpus: 8, mem: 64G}}"
    folder.joinpath("ours.yaml").write_text(
        f"scheduler: slurm\nrun_root: {repository}/runs\npartitions: {{cpu: {node}}}\n"
    )


def write(text: str, folder: Path | None = None) -> None:
    ((folder or Path()) / library.PROJECT_FILE).write_text(text)


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
    assert explained("train")["chdir"] == (str(repository), str(repository / library.PROJECT_FILE))
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
        os.chown(library.PROJECT_FILE, 65534, -1)
    else:  # who may not give a file away is somebody else here
        fake = SimpleNamespace(path=os.path, environ=os.environ, getuid=lambda: 65534)
        monkeypatch.setattr(library, "os", fake)
    assert "is not trusted" in refused("--dry-run")
    ok("sites", "trust", library.PROJECT_FILE)
    assert command() == ["train.py"]
    write("program: train.py --changed\n")
    assert "is not trusted" in refused("--dry-run")


def test_init_writes_what_submit_then_runs(repository: Path) -> None:
    wrote = ok("init", "-t", "10", "--ntasks-per-node", "2", "--env", "A=b c", "train.py", "--lr", "0 1")
    assert "next: hpcjobs submit" in wrote.err
    assert wrote.out == Path(library.PROJECT_FILE).read_text()
    assert command() == ["train.py", "--lr", "0 1"]
    assert explained()["env.A"] == ("b c", "hpcjobs.yaml")
    again = within("init", "train.py")
    assert (again.code, "--force" in again.err) == (5, True)
    assert ok("init", "--dry-run", "hostname").out != wrote.out == Path(library.PROJECT_FILE).read_text()


@pytest.mark.usefixtures("cluster")
def test_init_takes_the_options_of_a_batch_script(repository: Path) -> None:
    lines = "#SBATCH -N 2 -t 10\n#SBATCH --job-name=two --mem=4G --switches=1\n#SBATCH --comment 'a b'\n"
    Path("job.sh").write_text(f"#!/bin/bash\n{lines}srun hostname\n")
    content: dict[str, Any] = yaml.safe_load(ok("init", "--site", "ours", "-N", "3", "job.sh").out)
    assert content["program"] == "job.sh"
    assert content["name"] == "two"
    assert {"nodes": 3, "mem": "4G", "time": "00:10:00"}.items() <= content["resources"].items()
    jsonschema.validate(content, json.loads(ok("init", "--schema").out), jsonschema.Draft202012Validator)


@pytest.mark.parametrize(
    "line", ["--export=ALL", "--export NONE", "--export=ALL,A=1", "--export-file=env", "--mincpus=2"]
)
@pytest.mark.usefixtures("cluster")
def test_submit_takes_what_init_wrote_of_a_script_and_leaves_its_lines_to_it(repository: Path, line: str) -> None:
    Path("job.sbatch").write_text(f"#!/bin/bash\n#SBATCH -t 10 {line}\nhostname\n")
    wrote = ok("init", "--site", "ours", "job.sbatch").out
    assert "sbatch" not in yaml.safe_load(wrote)
    assert ok("submit", "--dry-run").out.count(line.replace(" ", "=")) == 1


@pytest.mark.usefixtures("cluster")
def test_the_hint_to_an_option_that_stays_in_a_script_does_not_contradict_itself(repository: Path) -> None:
    Path("job.sbatch").write_text("#!/bin/bash\n#SBATCH -t 10\nhostname\n")
    write("site: ours\nprogram: job.sbatch\nsbatch: [export=ALL]\n")
    assert "as an #SBATCH line" in refused()


@pytest.mark.usefixtures("cluster")
def test_init_writes_a_wrapped_command(repository: Path) -> None:
    content = yaml.safe_load(ok("init", "--site", "ours", "-t", "10", "--wrap", "srun hostname").out)
    assert content["wrap"] == "srun hostname"
    assert ok("submit", "--dry-run", "--json").json["job"]["argv"] == ["--wrap"]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["nope.py"], "no such file"),
        (["run.sh"], "chmod +x ./run.sh"),
        (["./run.sh"], "bash ./run.sh"),
        (["--site", "lokal", "train.py"], "did you mean 'local'?"),
        (["train.py", "-t", "10m", "--ntasks-per-node", "2"], "options of hpcjobs come before the program"),
        (["--wrap", "hostname", "--site", "local"], "--wrap"),
    ],
)
def test_init_refuses_what_submit_refuses(repository: Path, arguments: list[str], problem: str) -> None:
    Path("run.sh").write_text("#!/bin/sh\nhostname\n")
    for verb in ("init", "submit"):
        answer = within(verb, *arguments)
        assert answer.code in (4, 5)
        assert problem in answer.err
    assert not Path(library.PROJECT_FILE).exists()


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize("arguments", [["-N", "2", "train.py"], ["job.sh"], ["--wrap", "srun hostname"]])
def test_init_writes_a_job_for_a_cluster_that_is_not_the_default_site(arguments: list[str]) -> None:
    Path("job.sh").write_text("#!/bin/bash\n#SBATCH -N 2\nsrun hostname\n")
    wrote = ok("init", *arguments)
    assert "name the cluster that runs it: hpcjobs submit --site NAME" in wrote.err
    assert ok("submit", "--site", "ours", "--dry-run", "--json").json["job"]["site"] == "ours"
    assert "next: hpcjobs submit --site NAME --dry-run" in wrote.err
    assert within("init", "--force", "--site", "local", *arguments).code == 5


@pytest.mark.usefixtures("cluster")
def test_init_refuses_what_the_default_site_refuses_if_it_is_a_cluster(
    repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPCJOBS_SITE", "ours")
    assert within("init", "-N", "99", "train.py").code == 5
    assert not Path(library.PROJECT_FILE).exists()


def test_force_behind_the_program_is_named(repository: Path) -> None:
    write("program: train.py\n")
    answer = within("init", "train.py", "--force")
    assert (answer.code, "--force before the program" in answer.err) == (5, True)


@pytest.mark.parametrize(
    ("switch", "retries"), [("on", "timeout=∞"), ("true", "timeout=∞"), ("off", None), ("no", None)]
)
def test_on_and_off_need_no_quotes(repository: Path, switch: str, retries: str | None) -> None:
    write(f"program: train.py\nretries: {switch}\n")
    assert ("retries start" in ok("submit", "--dry-run").err) == (retries is not None)
    write(f"resources: {{}}\njobs: {{one: {{program: train.py, retries: {switch}}}}}\n")
    assert ("retries start" in ok("submit", "--dry-run", "one").err) == (retries is not None)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("nodes: 2\n", "write 'nodes' below 'resources'"),
        ("time: 1h\n", "write 'time' below 'resources'"),
        ("ntasks-per-node: 2\n", "write 'ntasks_per_node' below 'resources'"),
        ("jobs: {a: {gpus_per_node: 2}}\n", "write 'gpus_per_node' below 'resources'"),
        ("container: on\n", "in quotes: 'on'"),
        ("name: 12:30\n", "in quotes: '12:30'"),
        ("program: python train.py && echo hi\n", "bash -c 'python train.py && echo hi'"),
        ("program: cd sub; python train.py\n", "bash -c"),
        ("program: train.py > out\n", "bash -c"),
    ],
)
def test_a_likely_mistake_is_answered_with_what_to_write(repository: Path, text: str, problem: str) -> None:
    write(text)
    assert problem in refused()


def test_quoted_operators_and_lists_are_arguments(repository: Path) -> None:
    write("program: train.py '&&' 'a; b'\n")
    assert command() == ["train.py", "&&", "a; b"]
    write("program: train.py it\\'s {} \\;\n")
    assert command() == ["train.py", "it's", "{}", ";"]
    write('program: [train.py, "&&"]\n')
    assert command() == ["train.py", "&&"]


@pytest.mark.usefixtures("cluster")
def test_the_name_of_a_job_is_named_where_it_was_probably_meant(repository: Path) -> None:
    write(TWO)
    assert "did you mean evaluate?" in refused("eval")
    assert "jobs of hpcjobs.yaml: train, evaluate" in refused("something")
    assert "the job of hpcjobs.yaml is 'evaluate'" in ok("submit", "--site", "ours", "--dry-run", "evalute").err
    for verb in (["scale", "--nodes", "1"], ["sweep", "run", "--set", "a=1"]):
        answer = within(*verb, "evaluate")
        assert (answer.code, "it is a job of hpcjobs.yaml" in answer.err) == (5, True)


def test_a_file_of_another_ending_is_not_ignored_silently(repository: Path) -> None:
    Path("hpcjobs.yml").write_text("program: train.py\n")
    assert "hpcjobs.yml is not read: a project file is named hpcjobs.yaml" in refused()


@pytest.mark.parametrize("text", ["site: nowhere\n", "site: ./a/path.yaml\n", "site: [\n"])
def test_a_wrong_site_keeps_nobody_from_looking_at_jobs_and_ending_them(repository: Path, text: str) -> None:
    job = ok("submit", "--site", "local", "sleep", "100").out.split()[1]
    write(text)
    for arguments in (["ps"], ["show", job], ["logs", job], ["cancel", "--all"]):
        answer = ok(*arguments)
        assert "warning: no default site: " in answer.err or arguments[0] in ("show", "logs")
    assert f"cancelled {job}" in answer.out
    assert "no default site" not in refused("hostname")


@pytest.mark.parametrize("also", [[], ["--wait"], ["--array", "0-1"]])
def test_the_log_is_not_mixed_with_json(repository: Path, also: list[str]) -> None:
    answer = within("submit", "--json", "-f", *also, "hostname")
    assert answer.code == 2
    assert "--follow and --json exclude each other" in answer.json["error"]["message"]
    job = ok("submit", "--wait", "--json", "hostname").json["job_id"]
    assert within("rerun", "--json", "-f", job).code == 2


def test_an_editor_is_told_what_a_project_file_may_say(here: Path) -> None:
    checker = jsonschema.Draft202012Validator(json.loads(ok("init", "--schema").out))
    assert checker.is_valid(yaml.safe_load(TWO))
    assert not checker.is_valid({"programm": "train.py"})
    assert not checker.is_valid({"jobs": {"a": {"nodes": 2}}})


def test_a_spec_file_may_have_its_program_as_a_text_too(repository: Path) -> None:
    Path("job.yaml").write_text("program: train.py --lr '0 1'\n")
    assert command("--spec", "job.yaml") == ["train.py", "--lr", "0 1"]
