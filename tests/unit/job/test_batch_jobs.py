"""A batch script as a job: it asks Slurm for what it says, whatever the site's defaults are."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from scripts_here import run_here, without_complaint

import hpcjobs
from hpcjobs.errors import RequestError
from hpcjobs.job.models import Plan
from hpcjobs.job.options import parse_line
from hpcjobs.job.resolve import resolve
from hpcjobs.run.job_files import log_path

SITE = """
partitions:
  gpu: {default: true, nodes: 4, node: {cpus: 32, mem: 64G, gpus: 4, gpu_model: a100}, max_time: 1h}
defaults: {nodes: 2, time: 30m, account: site, cpus_per_task: 4}
directives: {account: null}
gpu_request: gpus-per-task
memory_request: mem-per-cpu
sbatch: [no-requeue]
retries: "on"
modules: [openmpi]
env: {A: site}
"""


@pytest.fixture
def site(here: Path) -> str:
    (here / "site.yaml").write_text(SITE)
    return "./site.yaml"


def plan(site: str, directives: str, *program: str, **options: object) -> Plan:
    Path("run.sbatch").write_text(f"#!/bin/bash\n{directives}\nsrun hostname\n")
    Path("run.sbatch").chmod(0o755)
    return hpcjobs.plan(["./run.sbatch", *program], site, **options)


def sent(site: str, directives: str, **options: object) -> list[str]:
    lines = [line for line in plan(site, directives, **options).script.splitlines() if line.startswith("#SBATCH")]
    return [line.removeprefix("#SBATCH --") for line in lines if "--output" not in line and "--open-mode" not in line]


@pytest.mark.parametrize(
    ("directives", "lines"),
    [
        ("#SBATCH -n 8", ["ntasks=8"]),
        ("#SBATCH --nodes=2 --ntasks-per-node=16\n#SBATCH -p gpu", ["partition=gpu", "nodes=2", "ntasks-per-node=16"]),
        ("#SBATCH --gres=gpu:2", ["gres=gpu:2"]),
        ("#SBATCH --gres=gpu:v100:2,nvme:10", ["gres=gpu:v100:2,nvme:10"]),
        ("#SBATCH --gpus-per-node=v100:2", ["gpus-per-node=v100:2"]),
        ("#SBATCH -G a100:8 --gpus-per-task=1", ["gpus=a100:8", "gpus-per-task=1"]),
        ("#SBATCH -t 90 --mem=500", ["mem=500M", "time=01:30:00"]),
        ("#SBATCH -t 0", ["time=UNLIMITED"]),
        ("#SBATCH -A mine --mem-per-cpu=2gb", ["mem-per-cpu=2G", "account=mine"]),
        ("#SBATCH --no-requeue --exclusive --nice", ["exclusive", "nice=100", "no-requeue"]),
        ("#SBATCH -o out.%j -e err.%j --export=NONE", ["export=NONE"]),
        ("#SBATCH --mincpus=4 --get-user-env", ["mincpus=4", "get-user-env"]),
        ("#SBATCH -J other -p nowhere", ["partition=nowhere"]),
        ("#SBATCH -t 9-0 -N 64", ["nodes=64", "time=9-00:00:00"]),
    ],
)
def test_a_script_asks_for_what_it_says(site: str, directives: str, lines: list[str]) -> None:
    name = "other" if "-J" in directives else "run.sbatch"
    assert sent(site, directives) == [f"job-name={name}", *lines]


def test_flags_and_the_users_settings_win_over_the_script(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "env")
    directives = "#SBATCH -A mine -N 2 --gres=gpu:2 --mem=4G"
    assert sent(site, directives, nodes=3, gpus_per_node=1, mem_per_cpu="1G") == [
        "job-name=run.sbatch", "nodes=3", "gres=gpu:1", "mem-per-cpu=1G", "account=env",
    ]  # fmt: skip


def test_explain_names_the_line_of_the_script(site: str) -> None:
    sources = plan(site, "#SBATCH -N 2\n#SBATCH --gres=gpu:2\n#SBATCH -J mine").job.sources
    assert {name: sources[name] for name in ("nodes", "gpus_per_node", "name", "launcher")} == {
        "nodes": "run.sbatch:2", "gpus_per_node": "run.sbatch:3", "name": "run.sbatch:4", "launcher": "batch script",
    }  # fmt: skip


def test_neither_software_nor_environment_nor_retries_of_the_site_are_added(site: str) -> None:
    planned = plan(site, "#SBATCH -N 2", env={"B": "flag"})
    assert (planned.job.retries, planned.job.prologue, planned.job.env) == (None, (), {"B": "flag"})
    for absent in ("OMP_NUM_THREADS", "MASTER_ADDR", "SLURM_EXPORT_ENV", "module load"):
        assert absent not in planned.script.replace("OMP_NUM_THREADS=$", "")


def test_wrapped_text_is_a_batch_script(site: str) -> None:
    planned = hpcjobs.plan((), site, wrap="echo $SLURM_JOB_ID", nodes=2)
    assert (planned.job.name, planned.job.batch_script) == (
        "wrap", b"#!/bin/sh\n# made by hpcjobs submit --wrap\n\necho $SLURM_JOB_ID\n",
    )  # fmt: skip


def test_a_launcher_that_is_named_decides_whether_a_script_starts_its_own_tasks(site: str) -> None:
    assert plan(site, "#SBATCH -N 1", launcher="srun").job.batch_script is None
    assert plan(site, "true", launcher="batch").job.batch_script is not None
    assert plan(site, "true").job.batch_script is None


@pytest.mark.parametrize(
    ("directives", "options", "text"),
    [
        ("#SBATCH --input=x", {}, "run.sbatch:2: --input is refused"),
        ("#SBATCH -N 1\n#SBATCH --time=soon", {}, "run.sbatch:3: time: 'soon' is not a time"),
        ("#SBATCH -N two", {}, "run.sbatch:2: nodes 'two' is not understood"),
        ("#SBATCH -N auto", {}, "run.sbatch:2: nodes 'auto' is an option of hpcjobs submit alone: -N auto"),
        ("#SBATCH -J ''", {}, "run.sbatch:2: job name '': empty values"),
        ("#SBATCH -M other", {}, "run.sbatch:2: --clusters is refused"),
        ("#SBATCH -N 1", {"container": "image"}, "container (flag): a batch script starts its own tasks"),
        ("#SBATCH -N 1", {"wrap": "true"}, "wrap and a program exclude each other"),
        ("#SBATCH -N 1", {"site": "local"}, "batch script: site local"),
    ],
)
def test_what_a_script_cannot_have_is_refused(
    site: str, directives: str, options: dict[str, object], text: str
) -> None:
    with pytest.raises(RequestError) as caught:
        plan(str(options.pop("site", site)), directives, **options)
    assert text in str(caught.value)


def test_what_a_script_names_in_vain_is_noted(site: str) -> None:
    from hpcjobs.job.plan import notes

    (line,) = notes(plan(site, "#SBATCH -o x.log -N 1").job)
    assert line.startswith("--output (run.sbatch:2) is left out: `hpcjobs logs`")


@pytest.mark.parametrize(
    ("program", "warned"),
    [
        (["train.py", "-N", "2"], ["-N"]),
        (["train.py", "--nodes=2", "--lr", "1"], ["--nodes=2"]),
        (["ls", "-N", "--partition", "x"], ["--partition"]),
        (["srun", "--nodes", "2", "hostname"], []),
        (["train.py", "--epochs", "2"], []),
    ],
)
def test_options_of_slurm_after_the_program_are_warned_of(
    here: Path, site: str, program: list[str], warned: list[str]
) -> None:
    from hpcjobs.job.plan import notes

    (here / "train.py").touch()
    lines = [line for line in notes(hpcjobs.plan(program, site).job) if "after the program" in line]
    assert [line.removeprefix("warning: ").split()[0] for line in lines] == warned


@pytest.mark.parametrize("options", [{}, {"retries": "on"}, {"array": "0-3"}], ids=["plain", "retries", "array"])
def test_the_script_around_a_batch_script_has_no_complaint_of_shellcheck(
    here: Path, site: str, options: dict[str, object]
) -> None:
    without_complaint([plan(site, "#SBATCH -N 1", "it's", "a b", env={"B": "x y"}, **options).script], here)


@pytest.mark.parametrize("launcher", [None, "batch"])
def test_a_script_without_an_interpreter_is_refused_as_sbatch_refuses_it(site: str, launcher: str | None) -> None:
    Path("run.sbatch").write_text("#SBATCH -N 2\nsrun hostname\n")
    with pytest.raises(RequestError, match="begins with the line of its interpreter"):
        hpcjobs.plan(["./run.sbatch"], site, launcher=launcher)


def test_a_script_is_looked_for_in_the_folder_of_chdir_then_here_then_on_path(
    here: Path, site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {name: here / name for name in ("there", "commands")}
    for folder in folders.values():
        folder.mkdir()
    monkeypatch.setenv("PATH", str(folders["commands"]), prepend=":")

    def name_of_job(**options: object) -> str:
        return hpcjobs.plan(["run.sbatch"], site, **options).job.name

    for name, folder in (("on-path", folders["commands"]), ("here", here), ("there", folders["there"])):
        (folder / "run.sbatch").write_text(f"#!/bin/bash\n#SBATCH -J {name}\n")
        assert name_of_job(chdir="there") == name
    assert name_of_job() == "here"


def test_a_name_of_several_words_reaches_slurm_and_is_no_part_of_a_path(here: Path, site: str) -> None:
    planned = plan(site, '#SBATCH -J "my / job\'s"')
    assert planned.job.name == "my / job's"
    (line,) = (line for line in planned.script.splitlines() if "--job-name" in line)
    (directive,) = parse_line(line.removeprefix("#SBATCH"), "job.sh")
    assert directive.value == "my / job's"
    assert f"--output={planned.run_dir}/logs/my___job_s_%j.out" in planned.script
    assert (planned.run_dir.parent, planned.run_dir.name[:11]) == (here / "runs", "my___job_s-")
    assert log_path(planned.run_dir, planned.job.name, "7").name == "my___job_s_7.out"


@pytest.mark.parametrize("first_line", ["#!/bin/bash", "#! /usr/bin/env -S bash -u ", "#!\t/bin/bash\t-u"])
def test_a_script_runs_where_no_file_can_be_executed(site: str, tmp_path: Path, first_line: str) -> None:
    """As on scratch that is mounted noexec: its run folder's copy has no permission to execute."""
    Path("run.sbatch").write_text(f'{first_line}\n#SBATCH -N 1\necho "$0 $*"\nexit 3\n')
    run_dir = tmp_path / "run folder"
    run_dir.mkdir()
    copy = run_dir / "batch_script"
    copy.write_bytes(Path("run.sbatch").read_bytes())
    copy.chmod(0o600)
    done = run_here(hpcjobs.plan(["./run.sbatch", "a b"], site), tmp_path)
    assert (done.returncode, f"{copy} a b\n" in done.stdout) == (3, True), done


def test_the_manifest_has_all_that_runs_the_script_again(site: str) -> None:
    """Also where a comment of it is no UTF-8."""
    Path("run.sbatch").write_bytes(b"#!/bin/bash\n# Gr\xfc\xdfe\n#SBATCH -N 2 --gres=gpu:1\nsrun hostname\n")
    job = hpcjobs.plan(["./run.sbatch", "a"], site, nodes=3).job
    again = msgspec.json.decode(msgspec.json.encode(job), type=type(job))
    assert (again, again.batch_script) == (job, Path("run.sbatch").read_bytes())
    assert resolve(again.layers, hpcjobs.load_site(site)) == job
