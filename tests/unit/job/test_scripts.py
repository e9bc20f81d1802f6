"""The script: read as a document, checked by bash and shellcheck, and run with hostile words."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from scripts_here import ARGUMENTS, GOLDEN, TELL, as_recorded, planned, run_here, without_complaint

import hpcjobs
from hpcjobs.data import data_folder
from hpcjobs.errors import ConfigError, RequestError
from hpcjobs.job.environment import check_env, prologue
from hpcjobs.job.launch import LAUNCHERS
from hpcjobs.job.plan import script_by_hand
from hpcjobs.node.decide import NODE_CODES
from hpcjobs.runtime.exits import ExitCode
from hpcjobs.site.models import Environment
from hpcjobs.site.trust import trust_file

SITES = sorted(path.stem for path in data_folder("site_configs").glob("*.yaml"))
CASES = [
    (site, launcher)
    for site in SITES
    for launcher, known in LAUNCHERS.items()
    if known.fits(hpcjobs.load_site(site).kind)
    and launcher in (hpcjobs.load_site(site).launchers or LAUNCHERS)
    and launcher in ("srun", "torchrun", "spawn")
]


@pytest.fixture(autouse=True)
def user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ada")


@pytest.mark.parametrize(("site", "launcher"), CASES)
def test_the_script_is_the_recorded_one(site: str, launcher: str, here: Path) -> None:
    """That of tu-hpc with srun in full; of a site the difference to it, of a launcher that to the site's first one."""
    (here / "train.py").touch()
    arguments, env = ("train.py", "--epochs", "3", "two words"), {"GREETING": "it's"}
    first = next(other for named, other in CASES if named == site)
    base = ("tu-hpc", "srun") if launcher == first else (site, first)
    as_recorded(planned(site, launcher, *arguments, env=env), f"{site}-{launcher}", planned(*base, *arguments, env=env))


RETRIES: list[tuple[str, str, str, dict[str, Any]]] = [
    ("retries-srun", "tu-hpc", "srun", {}),
    ("retries-torchrun", "tu-hpc", "torchrun", {}),
    ("retries-elastic", "tu-hpc", "torchrun", {"nodes": 3, "min_nodes": 2}),
    ("retries-mpirun", "tu-hpc", "mpirun", {}),
    ("retries-local", "a10g-box", "torchrun", {}),
]


@pytest.mark.parametrize(("name", "site", "launcher", "settings"), RETRIES)
def test_the_script_of_a_job_with_retries_is_the_recorded_one(
    name: str, site: str, launcher: str, settings: dict[str, Any], here: Path
) -> None:
    without = {option: value for option, value in settings.items() if option != "min_nodes"}
    as_recorded(
        planned(site, launcher, "true", retries="on", **settings), name, planned(site, launcher, "true", **without)
    )


def test_bash_and_shellcheck_have_no_complaint_about_any_script(tmp_path: Path) -> None:
    plans = [planned(site, launcher, "true") for site, launcher in CASES]
    plans += [planned(site, launcher, "true", retries="on", **output) for _, site, launcher, output in RETRIES]
    plans += [planned("sandbox", "srun", "true", template=name) for name in ("sweep", "jupyter", "fabric")]
    plans += [planned("sandbox", "srun", "true", array="0-3", preflight=True, spare=1, retries="on")]
    without_complaint([plan.script for plan in plans] + [script_by_hand(plans[0])], tmp_path)


def test_bash_and_shellcheck_have_no_complaint_about_the_files_that_scripts_use() -> None:
    shellcheck = Path(sys.executable).with_name("shellcheck")
    files = sorted((data_folder("templates") / "shell").iterdir())
    done = subprocess.run([shellcheck, "--norc", "--external-sources", *files], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize(("site", "launcher"), CASES)
def test_the_script_runs_every_task_with_its_rank_and_the_words_unchanged(
    site: str, launcher: str, here: Path, tmp_path: Path
) -> None:
    (here / "tell.py").write_text(TELL)
    plan = planned(site, launcher, "tell.py", *ARGUMENTS, env={"WORD": "".join(ARGUMENTS)}, cpus_per_task=3)
    done = run_here(plan, tmp_path)
    assert done.returncode == 0, done
    world = 2 * plan.job.nodes
    for rank in range(world):
        document = json.loads((tmp_path / "run folder" / f"rank{rank}.json").read_text())
        assert document == {
            "argv": ARGUMENTS,
            "cwd": str(here),
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % 2),
            "NODE_RANK": str(rank // 2),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": "2",
            "OMP_NUM_THREADS": "3",
            "WORD": "".join(ARGUMENTS),
        }
    assert not list(tmp_path.rglob("x"))
    state = json.loads((tmp_path / "run folder" / "state.json").read_text())
    assert (state["state"], state["exit_code"]) == ("COMPLETED", 0)


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_the_script_records_the_first_failure_and_ends_with_its_code(launcher: str, here: Path, tmp_path: Path) -> None:
    (here / "tell.py").write_text(TELL)
    done = run_here(planned("sandbox", launcher, "tell.py", env={"WORD": "", "FAIL": "7"}), tmp_path)
    assert done.returncode == 7
    state = json.loads((tmp_path / "run folder" / "state.json").read_text())
    assert (state["state"], state["exit_code"], state["first_failure"]["rank"]) == ("FAILED", 7, 1)
    assert "hpcjobs: first failure: rank 1 on " in done.stderr


@pytest.mark.parametrize(
    ("launcher", "asks"),
    [("srun", "--gpus-per-task=2"), ("torchrun", None), ("mpirun", None)],
)
def test_where_gpus_are_asked_by_the_task_one_task_per_node_has_all_of_them(
    launcher: str, asks: str | None, here: Path, tmp_path: Path
) -> None:
    """torchrun's agent and mpirun's daemon start the ranks; Slurm would give them the GPUs of one rank."""
    site = replace(hpcjobs.load_site("nebius-h100"), gpu_request="gpus-per-task", launchers=None)
    output: dict[str, Any] = {"nodes": 2, "ntasks_per_node": 4, "gpus_per_node": 8, "launcher": launcher}
    script = hpcjobs.plan(["true"], site=site, **output).script
    assert "#SBATCH --gpus-per-task=h100:2" in script
    assert "export SLURM_GPUS_PER_NODE=8\nunset SLURM_GPUS_PER_TASK SLURM_TRES_PER_TASK\n" in script
    (started,) = [line for line in script.splitlines() if line.startswith((f"{launcher} ", "srun "))]
    assert [part for part in started.split() if "gpus" in part] == ([] if asks is None else [asks])


def test_horovodrun_starts_jobs_of_the_university_cluster() -> None:
    """On one node it takes no other interface than loopback."""
    script = planned("tu-hpc", "horovodrun", "true").script
    assert ' horovod.runner.launch --gloo -np "$HPCJOBS_NTASKS" -H "$_hj_hosts" --network-interfaces eth0 ' in script
    assert "--network-interfaces" not in planned("tu-hpc", "horovodrun", "true", nodes=1).script


def test_a_module_that_does_not_load_ends_the_job_by_name(here: Path, tmp_path: Path) -> None:
    plan = planned("tu-hpc", "srun", "true")
    broken = plan._replace(script=plan.script.replace("module load openmpi ||", "false ||"))
    done = run_here(broken, tmp_path)
    assert done.returncode == 1
    assert "module load openmpi failed" in done.stderr
    assert json.loads((tmp_path / "run folder" / "state.json").read_text())["state"] == "FAILED"


@pytest.mark.parametrize(
    ("in_path", "module", "printed"),
    [
        (True, "", "started\n"),
        (False, 'module() { echo "module $*"; }', "module load mpi/openmpi-x86_64\nstarted\n"),
        (False, "", "started\n"),
    ],
)
def test_a_workstation_loads_its_module_of_mpi_only_where_mpi_is_not_in_path(
    in_path: bool, module: str, printed: str, tmp_path: Path
) -> None:
    """Who has neither, and starts no MPI, needs neither."""
    if in_path:
        (tmp_path / "mpirun").write_text("#!/bin/sh\n")
        (tmp_path / "mpirun").chmod(0o755)
    lines = "\n".join(prologue(hpcjobs.load_site("rocky-4070"))).replace("/etc/profile.d/modules.sh", "/no/such/file")
    script = f'die() {{ echo "died: $*"; exit 1; }}\n{module}\n{lines}\necho started\n'
    bash = shutil.which("bash")
    assert bash is not None
    done = subprocess.run([bash, "-c", script], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (printed, "")


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (Environment(venv="/no/such/venv"), "no virtual environment at /no/such/venv"),
        (Environment(conda="of-nobody"), "conda environment of-nobody cannot be activated"),
        (Environment(conda="any", conda_init="/no/such/conda.sh"), "conda environment any cannot be activated"),
    ],
)
def test_an_environment_that_is_not_there_ends_the_job_by_its_name_and_the_nodes(
    section: Environment, message: str, tmp_path: Path
) -> None:
    site = replace(hpcjobs.load_site("tu-hpc"), node_local=(), modules=(), environment=section)
    plan = hpcjobs.plan(["true"], site=site, nodes=2)
    done = run_here(plan._replace(script=plan.script.replace("conda activate", "false conda activate")), tmp_path)
    assert done.returncode == 1
    assert f"hpcjobs: {os.uname().nodename}: {message}" in done.stderr
    assert not (tmp_path / "run folder" / "first_failure").exists()  # no rank was started


NOT_OURS = {"MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "PATH", "PYTHONPATH", "PYTHONUTF8", "PYTHONHOME", "IFS"}
"""Variables of the program: a user's own value reaches it."""


SHELL_FILES = sorted(path.name for path in (data_folder("templates") / "shell").iterdir())
ASSIGNED = r"^\s*(?:export )?([A-Za-z_]\w*)\+?=|\bfor ([A-Za-z_]\w*) in|exec {([A-Za-z_]\w*)}>"


@pytest.mark.parametrize("text", [*SHELL_FILES, "job.sh"])
def test_a_variable_that_the_scripts_keep_for_themselves_has_their_prefix(text: str) -> None:
    """Locals of functions that start no program are their own; everything else would reach the program."""
    script = planned("sandbox", "srun", "true", retries="on").script
    script = script if text == "job.sh" else (data_folder("templates") / "shell" / text).read_text()
    script = re.sub(r"^\s*#.*$", "", script, flags=re.M)
    declared = re.findall(r"^\s*local (.*)$", script, re.M)
    local = {name for line in declared for name in re.findall(r"([a-z_]+)(?:=|\s|$)", line)}
    assigned = re.findall(ASSIGNED, script, re.M)
    for name in {name for names in assigned for name in names if name} - local - {"_"}:
        if name.startswith(("_hj_", "SLURM_", "OMPI_", "HOROVOD_", "GLOO_", "NCCL_")) or name in NOT_OURS:
            continue
        with pytest.raises(RequestError):
            check_env({name: ""}, {})


@pytest.mark.parametrize("name", ["host", "code", "task", "step", "label", "run_dir", "state", "image", "port", "rank"])
def test_a_users_variable_may_have_any_ordinary_name(name: str, here: Path, tmp_path: Path) -> None:
    (here / "tell.py").write_text(TELL)
    arguments = ["sh", "-c", f'[ "${name}" = mine ]']
    for launcher in ("srun", "torchrun"):
        (tmp_path / launcher).mkdir()
        done = run_here(planned("sandbox", launcher, *arguments, env={name: "mine"}), tmp_path / launcher)
        assert done.returncode == 0, done


def test_a_job_without_retries_runs_on_a_node_without_python(here: Path, tmp_path: Path) -> None:
    """Nothing but bash, the tools that every system has, and Slurm's commands."""
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("bash", "sh", "hostname", "grep", "mv", "mkdir", "rm", "sed", "head", "getconf", "timeout", "true"):
        (bare / name).symlink_to(str(shutil.which(name)))
    plan = planned("tu-hpc", "srun", "sh", "-c", "command -v python3 python; echo rank $RANK", ntasks_per_node=1)
    done = run_here(plan, tmp_path, PATH=f"{tmp_path}/stubs:{bare}")
    assert done.returncode == 0, done
    assert {"rank 0", "rank 1"} <= set(done.stdout.splitlines())
    assert "python3" not in done.stdout
    assert json.loads((tmp_path / "run folder" / "state.json").read_text())["state"] == "COMPLETED"


def test_the_script_of_a_dry_run_brings_all_that_it_uses(here: Path, tmp_path: Path) -> None:
    (here / "tell.py").write_text(TELL)
    for launcher in ("srun", "torchrun"):
        plan = planned("sandbox", launcher, "tell.py", env={"WORD": "one"})
        (tmp_path / launcher).mkdir()
        done = run_here(plan._replace(script=script_by_hand(plan)), tmp_path / launcher, files=False)
        assert done.returncode == 0, done
        run_dir = tmp_path / launcher / "run folder"
        assert json.loads((run_dir / "state.json").read_text())["state"] == "COMPLETED"
        # The tasks of an array start together: none may read what another one is just writing.
        assert (run_dir / "shell-7" / "rank.sh").read_text() == (
            data_folder("templates") / "shell" / "rank.sh"
        ).read_text()


def test_the_script_of_two_nodes_is_read_at_one_glance() -> None:
    assert len((GOLDEN / "tu-hpc-srun.sh").read_text().splitlines()) <= 80


def test_exit_codes_in_the_shell_files_are_those_of_the_package() -> None:
    rank = (data_folder("templates") / "shell" / "rank.sh").read_text()
    assert f"requeue={int(ExitCode.REQUEUE)}\n" in rank
    (restarted,) = re.findall(r"^\s*([\d |]+)\) rm -f", rank, re.M)
    assert {int(code) for code in restarted.split(" | ")} == set(NODE_CODES)


def template(text: str, name: str = "mine") -> None:
    path = Path("templates") / f"{name}.sh.j2"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    trust_file(path, text)


def test_a_template_of_ones_own_extends_the_shipped_one_even_under_its_name(here: Path) -> None:
    template(
        '{% extends "shipped/job.sh.j2" %}{% block epilogue %}echo the end of {{ job.name }}\n{% endblock %}', "job"
    )
    plan = planned("sandbox", "srun", "true")
    assert "\necho the end of true\n" in plan.script
    assert f"# template {here}/templates/job.sh.j2\n" in plan.script


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ('{% extends "shipped/job.sh.j2" %}\n{% block prologue %}\n{{ job.modles }}{% endblock %}', 3, "modles"),
        ("\n{{ nobody }}", 2, "'nobody' is undefined"),
        ("\n\n{% if %}", 3, "Expected an expression"),
        ('{% extends "mine.sh.j2" %}', 1, "extends itself"),
    ],
)
def test_a_template_at_fault_is_named_with_file_and_line(here: Path, text: str, line: int, message: str) -> None:
    template(text)
    with pytest.raises(ConfigError) as caught:
        planned("sandbox", "srun", "true", template="mine")
    assert f"{here}/templates/mine.sh.j2:{line}" in str(caught.value)
    assert message in str(caught.value)


def test_an_unknown_template_is_answered_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no template 'jop.sh.j2'\nhint: did you mean 'job'"):
        planned("sandbox", "srun", "true", template="jop")


def test_an_agent_that_ends_after_the_one_with_the_store_prints_no_trace_of_the_lost_connection() -> None:
    script = planned("tu-hpc", "torchrun", "true").script
    quiet = script.index('export TORCH_CPP_LOG_LEVEL="${TORCH_CPP_LOG_LEVEL:-ERROR}"')
    assert quiet < script.rindex("srun "), "before the agents start; the user's own value stays"


@pytest.mark.parametrize("launcher", ["srun", "spawn"])
def test_the_state_file_is_whole_also_where_a_signal_ends_the_scripts_helpers(
    launcher: str, here: Path, tmp_path: Path
) -> None:
    """A signal for all processes of a job ends what the script has just started, `date` for example."""
    plan = planned("tu-hpc" if launcher == "srun" else "local", launcher, "true")
    helpers = tmp_path / "helpers"
    helpers.mkdir()
    (helpers / "date").write_text("#!/bin/sh\nkill -TERM $$\n")
    (helpers / "date").chmod(0o755)
    run_here(plan, tmp_path, PATH=f"{tmp_path}/stubs:{helpers}:{os.environ['PATH']}")
    state = json.loads((tmp_path / "run folder" / "state.json").read_text())
    assert state["state"] == "COMPLETED"
    assert 0 <= state["ended"] - state["started"] < 60
