"""From layers of requested values to one resolved job within the site's limits."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import hpcjobs
from hpcjobs.errors import RequestError
from hpcjobs.job.layers import VARIABLES
from hpcjobs.job.models import Job, Plan
from hpcjobs.processes.start import module_words

SITE = """
partitions:
  small:
    default: true
    nodes: 4
    max_nodes: 2
    max_time: 2h
    node: {cpus: 8, mem: 16G, gpus: 2, gpu_model: a100}
    qos: [normal, short]
    defaults: {cpus_per_task: 2, time: 30m}
  big:
    nodes: 8
    node: {cpus: 64, mem: 256G}
qos: {normal: 1-00:00:00, short: 1h, other: ""}
defaults: {time: 1h, account: physics, nodes: 1, cpus_per_task: 1}
"""


@pytest.fixture
def site(here: Path) -> str:
    (here / "site.yaml").write_text(SITE)
    return "./site.yaml"


def resolve_job(site: str, *, spec: str | None = None, **options: object) -> Job:
    if spec is not None:
        Path("job.yaml").write_text(spec)
    plan: Plan = hpcjobs.plan(["true"], site=site, spec="job.yaml" if spec is not None else None, **options)  # type: ignore[arg-type]
    return plan.job


def refused(site: str, **options: object) -> str:
    with pytest.raises(RequestError) as caught:
        resolve_job(site, **options)
    return str(caught.value)


def test_flags_win_over_the_spec_which_wins_over_partition_and_site(site: str) -> None:
    job = resolve_job(site, spec="resources: {time: 45m, nodes: 2}\n", time="50m")
    values = {
        name: (getattr(job.resources, name), job.sources[name])
        for name in ("account", "cpus_per_task", "nodes", "time")
    }
    assert values == {
        "account": ("physics", "site site"),
        "cpus_per_task": (2, "partition small of site site"),
        "nodes": (2, "job.yaml"),
        "time": ("00:50:00", "flag"),
    }


def test_the_partition_asked_for_brings_its_own_defaults(site: str) -> None:
    job = resolve_job(site, spec="resources: {partition: big}\n")
    assert (job.resources.cpus_per_task, job.resources.time) == (1, "01:00:00")


def test_an_explicit_null_clears_what_the_site_says(site: str) -> None:
    job = resolve_job(site, spec="resources: {account: null}\n", time=None)
    assert (job.resources.account, job.resources.time) == (None, None)
    assert (job.sources["account"], job.sources["time"]) == ("job.yaml", "flag")


def test_a_node_gets_one_task_per_gpu_unless_told_otherwise(site: str) -> None:
    assert (resolve_job(site, gpus_per_node=2).ntasks_per_node, resolve_job(site).ntasks_per_node) == (2, 1)
    assert resolve_job(site, gpus_per_node=2, ntasks_per_node=1).ntasks_per_node == 1


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"nodes": 3}, "nodes=3 (flag): partition small allows 2"),
        ({"time": "3h"}, "time=03:00:00 (flag): partition small allows 02:00:00"),
        ({"gpus_per_node": 3}, "gpus_per_node=3 (flag): a node of partition small has 2"),
        ({"mem": "17G"}, "mem=17G (flag): a node of partition small has 16G"),
        (
            {"ntasks_per_node": 5},
            "ntasks_per_node=5 (flag) x cpus_per_task=2 = 10 CPUs: a node of partition small has 8",
        ),
        ({"mem_per_cpu": "9G"}, "mem_per_cpu=9G (flag) x 2 CPUs: a node of partition small has 16G"),
        ({"qos": "other"}, "qos=other (flag): partition small accepts normal, short"),
        ({"qos": "none"}, "qos=none (flag): known: normal, other, short"),
        ({"qos": "short", "time": "90m"}, "time=01:30:00 (flag): qos short allows 1h"),
        ({"mem": "1G", "mem_per_cpu": "1G"}, "mem, mem_per_cpu and mem_per_gpu exclude each other"),
        ({"clusters": "other"}, "clusters=other (flag): ps, wait and cancel would ask another cluster about the job"),
        ({"array": "5-2"}, "array '5-2' is not understood"),
        ({"array": "1-"}, "array '1-' is not understood"),
        ({"array": "0-9%x"}, "array '0-9%x' is not understood"),
    ],
)
def test_each_limit_is_checked_and_names_who_asked_and_what_is_allowed(
    site: str, settings: dict[str, object], arguments: str
) -> None:
    answer = refused(site, **settings)
    assert arguments in answer
    assert "site.yaml" in answer


def test_all_limits_exceeded_are_named_at_once(site: str) -> None:
    answer = refused(site, nodes=9, time="9h", mem="99G", gpus_per_node=4, cpus_per_task=9)
    assert len(answer.splitlines()) == 6


def test_what_just_fits_is_accepted(site: str) -> None:
    job = resolve_job(
        site, nodes=2, time="2h", mem="16G", gpus_per_node=2, ntasks_per_node=4, cpus_per_task=2, qos="normal"
    )
    assert job.ntasks == 8


def test_an_unknown_partition_is_answered_with_the_nearest(site: str) -> None:
    assert "partition 'smal' (flag) is not one of site site" in refused(site, partition="smal")
    assert "did you mean 'small'?" in refused(site, partition="smal")


def test_an_unknown_option_is_answered_with_the_nearest(site: str) -> None:
    answer = refused(site, ntask_per_node=2)
    assert "ntask_per_node" in answer
    assert "did you mean 'ntasks_per_node'?" in answer


def test_a_launcher_of_the_other_scheduler_is_refused(site: str) -> None:
    assert "launcher 'spawn' is not available on site site" in refused(site, launcher="spawn")
    with pytest.raises(RequestError, match="launcher 'srun' is not available on site local"):
        hpcjobs.plan(["true"], site="local", launcher="srun")


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "HPCJOBS_RUN_DIR", "_hj_step", "SLURM_PROCID", "IFS", "UID"])
def test_a_variable_that_the_script_or_bash_sets_is_refused_by_name(site: str, name: str) -> None:
    assert f"env {name} (flag): " in refused(site, env={name: "1"})


@pytest.mark.parametrize(("name", "value"), [("a b", "1"), ("1A", "1"), ("A", "x\0y"), ("A", "\udcff")])
def test_a_variable_that_no_environment_can_hold_is_refused(site: str, name: str, value: str) -> None:
    refused(site, env={name: value})


@pytest.mark.parametrize("field", ["comment", "constraint", "nodelist"])
def test_a_value_with_a_newline_is_refused_by_name(site: str, field: str) -> None:
    assert f"{field} 'a\\nb'" in refused(site, **{field: "a\nb"})


def test_programs_are_trainers_modules_files_or_commands(site: str, here: Path) -> None:
    (here / "train.py").touch()
    (here / "tool").touch(mode=0o755)

    def argv(*program: str) -> tuple[str, ...]:
        return hpcjobs.plan(program, site=site).job.argv

    python = sys.executable
    assert argv("ddp", "--steps", "3") == (python, "-u", *module_words("hpcjobs.trainers.ddp"), "--steps", "3")
    assert argv("pkg.mod", "-x") == (python, "-u", "-m", "pkg.mod", "-x")
    assert argv("train.py", "a b") == (python, "-u", "train.py", "a b")
    assert argv("./tool", "") == ("./tool", "")
    assert argv("nvidia-smi", "-L") == ("nvidia-smi", "-L")


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ((), "no program to run"),
        (("gone.py",), "program gone.py: no such file in "),
        (("./gone",), "program ./gone: no such file in "),
        (("here-only",), "`chmod +x ./here-only`"),
        (("./here-only",), "the file is not executable"),
        (("ready",), "use ./ready"),
        (("a;id",), "`bash 'a;id'` for a script of shell; or `chmod +x './a;id'`, then './a;id'"),
        (("-e.sh",), "`bash ./-e.sh` for a script of shell; or `chmod +x ./-e.sh`, then ./-e.sh"),
        (("-d/e.sh",), "`bash ./-d/e.sh` for a script of shell; or `chmod +x ./-d/e.sh`, then ./-d/e.sh"),
    ],
)
def test_a_program_that_cannot_run_is_refused_at_once(
    site: str, here: Path, program: tuple[str, ...], message: str
) -> None:
    (here / "-d").mkdir()
    for name in ("here-only", "a;id", "-e.sh", "-d/e.sh"):
        (here / name).touch()
    (here / "ready").touch(mode=0o755)
    with pytest.raises(RequestError) as caught:
        hpcjobs.plan(program, site=site)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("program", "name"),
    [("./src/train.py", "train"), ("pkg.mod", "mod"), ("ddp", "ddp"), ("/bin/echo", "echo"), ("./नमस्ते.sh", "job")],
)
def test_a_job_is_named_after_its_program(site: str, here: Path, program: str, name: str) -> None:
    path = here / program
    if "/" in program and not path.exists():
        path.parent.mkdir(exist_ok=True)
        path.touch(mode=0o755)
    assert hpcjobs.plan([program], site=site).job.name == name


@pytest.mark.parametrize("name", ["", "a\nb", "a" * 181])
def test_a_job_name_that_slurm_or_a_script_cannot_hold_is_refused(site: str, name: str) -> None:
    assert "job name" in refused(site, name=name)


def test_no_run_folder_is_made_where_each_node_has_its_own(here: Path) -> None:
    (here / "site.yaml").write_text(SITE + f"node_local: [{here}]\n")
    with pytest.raises(RequestError, match="which is local to each node of site site"):
        hpcjobs.plan(["true"], site="./site.yaml")


def test_a_users_own_settings_of_sbatch_win_over_the_site_and_lose_to_what_the_job_says(
    site: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"ACCOUNT": "mine", "PARTITION": "big", "QOS": "other", "TIMELIMIT": "90"}.items():
        monkeypatch.setenv(f"SBATCH_{name}", value)
    job = resolve_job(site, spec="resources: {qos: normal}\n", time="50m")
    values = {
        name: (getattr(job.resources, name), job.sources[name]) for name in ("account", "partition", "qos", "time")
    }
    assert values == {
        "account": ("mine", "SBATCH_ACCOUNT"),
        "partition": ("big", "SBATCH_PARTITION"),
        "qos": ("normal", "job.yaml"),
        "time": ("00:50:00", "flag"),
    }
    assert resolve_job(site).resources.time == "01:30:00"
    played = hpcjobs.plan(["true"], site=replace(hpcjobs.load_site(site), rehearsal=True)).job
    assert (played.resources.account, played.resources.partition) == ("physics", "big"), "a sandbox has no such account"


@pytest.mark.parametrize(
    ("name", "value"), [("SBATCH_PARTITION", "nobodys"), ("SBATCH_TIMELIMIT", "soon"), ("SBATCH_CPUS_PER_GPU", "few")]
)
def test_a_setting_of_sbatch_that_cannot_be_is_refused_by_the_variables_name(
    site: str, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    monkeypatch.setenv(name, value)
    result = refused(site)
    assert name in result
    assert value in result


@pytest.mark.parametrize(
    ("name", "value", "directive"),
    [
        ("SBATCH_MEM_PER_NODE", "4000", "--mem=4000M"),
        ("SBATCH_MEM_PER_CPU", "1G", "--mem-per-cpu=1G"),
        ("SBATCH_GRES", "nvme:2", "--gres=gpu:t4:1,nvme:2"),
        ("SBATCH_GPUS", "2", "--nodes=2"),
        ("SBATCH_HINT", "nomultithread", "--hint=nomultithread"),
    ],
)
def test_memory_and_gpus_that_a_user_has_set_for_sbatch_are_requested(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, directive: str
) -> None:
    monkeypatch.setenv(name, value)
    assert f"#SBATCH {directive}\n" in hpcjobs.plan(["true"], site="gcp-t4").script


def test_the_page_lists_the_settings_of_sbatch_that_are_read() -> None:
    page = (Path(__file__).parents[3] / "docs" / "sbatch.md").read_text(encoding="utf-8")
    section = page.partition("## Settings in the environment\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"`SBATCH_([A-Z_]+)`", section)) == set(VARIABLES)


def test_no_run_folder_is_made_where_a_link_leads_to_what_each_node_has_for_itself(here: Path) -> None:
    local = here / "local"
    local.mkdir()
    (here / "runs").symlink_to(local)
    (here / "site.yaml").write_text(SITE + f"node_local: [{local}]\n")
    with pytest.raises(RequestError, match=rf"which leads to {local}.* is in {local}, which is local to each node"):
        hpcjobs.plan(["true"], site="./site.yaml")
    (here / "runs").unlink()
    (here / "scratch").symlink_to(here)
    (here / "site.yaml").write_text(SITE + f"node_local: [{here}/scratch]\n")
    with pytest.raises(RequestError, match="which is local to each node of site site"):
        hpcjobs.plan(["true"], site="./site.yaml")
