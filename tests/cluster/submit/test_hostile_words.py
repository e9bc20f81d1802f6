"""Words that shells, Slurm and templates could take apart reach the program as they are, or are refused by name."""

from __future__ import annotations

import json

import pytest
from login_node import Cluster

TELL = """
import json, os, pathlib, sys
if os.environ["RANK"] == "1":
    told = {"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd()}
    (pathlib.Path(os.environ["HPCJOBS_RUN_DIR"]) / "told.json").write_text(json.dumps(told))
"""

ARGUMENTS = [
    "two words",
    "",
    "'single'",
    '"double"',
    "'\\''",
    "$(touch x)",
    "`touch x`",
    "$HOME ${RANK} $$ ${local_rank}",
    "back\\slash",
    "trailing\\",
    "new\nline\n",
    "tab\there",
    "a,b;c&d|e>f",
    "100% %j %x %%",
    "#SBATCH --nodes=9",
    "{{ job }} {% raw %}",
    "-N",
    "--nodes=9",
    "--",
    "* ? [a]",
    "!history",
    "~",
    "TASK",
    "नमस्ते दुनिया",
    "\x1b[31m\x7f",
]

FOLDERS = [
    "two  words",
    "it's",
    'say "so"',
    "$(touch x)",
    "`touch x`",
    "a,b;c&d",
    "100%j",
    "नमस्ते",
    "#hash",
    "{{ job }}",
    "-dash",
    "*",
    "~",
]


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_arguments_and_environment_values_arrive_unchanged(cluster: Cluster, launcher: str) -> None:
    values = {f"WORD_{n}": part for n, part in enumerate(ARGUMENTS)}
    flags = [token for name, value in values.items() for token in ("--env", f"{name}={value}")]
    program = cluster.program("tell.py", TELL)
    job = cluster.submit("--ntasks-per-node", "2", "--launcher", launcher, *flags, program, *ARGUMENTS).done()
    document = json.loads((job.run_dir / "told.json").read_text())
    assert document["argv"] == ARGUMENTS
    assert {name: document["env"][name] for name in values} == values
    assert not (cluster.folder / "x").exists()


def test_jobs_run_in_folders_of_any_name(cluster: Cluster) -> None:
    jobs = {}
    for name in FOLDERS:
        folder = cluster.folder / name
        folder.mkdir()
        (folder / "tell.py").write_text(TELL)
        jobs[name] = cluster.submit("--ntasks-per-node", "2", "tell.py", cwd=folder)
    for name, job in jobs.items():
        job.done()
        assert json.loads((job.run_dir / "told.json").read_text())["cwd"] == str(cluster.folder / name)
        assert job.run_dir.is_relative_to(cluster.folder / name)
        assert [path.name for path in (job.run_dir / "logs").iterdir()] == [f"tell_{job.id}.out"]
    assert not list(cluster.folder.rglob("x"))


@pytest.mark.parametrize("name", ["back\\slash", "new\nline"])
def test_a_folder_that_no_directive_can_hold_is_refused_by_name(cluster: Cluster, name: str) -> None:
    folder = cluster.folder / name
    folder.mkdir()
    answer = cluster.hpcjobs("submit", "--site", "tu-hpc", "true", cwd=folder)
    assert answer.code == 5, answer
    assert repr(name).strip("'") in answer.err
    assert "Traceback" not in answer.err
    assert not list(folder.iterdir())


@pytest.mark.parametrize("name", ["back\\slash", "new\nline"])
def test_a_job_can_still_work_in_such_a_folder(cluster: Cluster, name: str) -> None:
    folder = cluster.folder / name
    folder.mkdir()
    (folder / "tell.py").write_text(TELL)
    (cluster.folder / "site_configs").mkdir()
    shown = cluster.hpcjobs("sites", "show", "tu-hpc", "--json").json
    settings = {key: shown[key] for key in ("partitions", "defaults", "mpi", "interface", "python", "node_local")}
    site = cluster.folder / "elsewhere.yaml"
    site.write_text(
        json.dumps({**settings, "slurm_conf": shown["slurm_conf"], "run_root": str(cluster.folder / "runs")})
    )
    answer = cluster.hpcjobs("submit", "-s", str(site), "--json", "--ntasks-per-node", "2", "tell.py", cwd=folder)
    assert answer.code == 0, answer
    job = cluster.took(answer.out).done()
    assert json.loads((job.run_dir / "told.json").read_text())["cwd"] == str(folder)
