"""What binds the ranks of a job to cores and GPUs, in its script and in `--explain`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import within

import hpcjobs
from hpcjobs.data import data_folder
from hpcjobs.errors import ConfigError
from hpcjobs.processes.start import module_words

NODE = "{cpus: 64, gpus: 4}"
SLURM = f"partitions: {{gpu: {{nodes: 4, node: {NODE}}}}}\n"


def script(here: Path, extra: str, launcher: str, **options: object) -> str:
    (here / "x.yaml").write_text(SLURM + extra, encoding="utf-8")
    return hpcjobs.plan("./p", "./x.yaml", launcher=launcher, nodes=2, ntasks_per_node=4, **options).script


@pytest.fixture(autouse=True)
def program(here: Path) -> None:
    (here / "p").write_text("#!/bin/sh\n")
    (here / "p").chmod(0o755)


def test_ranks_of_a_job_with_gpus_have_cores_and_lie_in_the_order_of_the_gpus(here: Path) -> None:
    text = script(here, "", "srun", gpus_per_node=4)
    assert " --cpu-bind=cores --distribution=block:block " in text
    assert "--gpu-bind" not in text


def test_a_job_without_gpus_is_bound_as_the_cluster_binds(here: Path) -> None:
    text = script(here, "", "srun")
    assert "--cpu-bind" not in text
    assert "--distribution" not in text


@pytest.mark.parametrize("launcher", ["srun", "torchrun"])
def test_a_job_without_gpus_is_not_bound_to_the_numa_nodes_of_gpus(launcher: str, here: Path) -> None:
    """torch ends where it finds no GPU of that number."""
    affinity = "affinity: {numa_binding: node, gpu_bind: closest}\n"
    text = script(here, affinity, launcher)
    assert "--numa-binding" not in text
    assert "--gpu-bind" not in text
    assert ("--numa-binding=node" in script(here, affinity, launcher, gpus_per_node=4)) is (launcher == "torchrun")


def test_a_distribution_of_the_job_wins_over_the_sites_and_default_leaves_it_to_the_cluster(here: Path) -> None:
    affinity = "affinity: {cpu_bind: default, gpu_bind: 'map_gpu:3,2,1,0', distribution: 'block:cyclic'}\n"
    text = script(here, affinity, "srun", gpus_per_node=4)
    assert " --distribution=block:cyclic --gpu-bind=map_gpu:3,2,1,0 " in text
    assert "--cpu-bind" not in text
    text = script(here, affinity, "srun", gpus_per_node=4, distribution="plane=2")
    assert "#SBATCH --distribution=plane=2\n" in text
    assert " --distribution=block" not in text


def test_mpirun_binds_as_the_site_says_with_the_cores_of_each_rank(here: Path) -> None:
    assert "--map-by ppr:4:node --bind-to none " in script(here, "", "mpirun", cpus_per_task=8)
    text = script(here, "affinity: {mpirun_bind_to: core}\n", "mpirun", cpus_per_task=8)
    assert "--map-by ppr:4:node:PE=8 --bind-to core " in text


@pytest.mark.parametrize(
    ("extra", "options", "mode"),
    [
        ("", {"exclusive": True}, "node"),
        ("", {}, None),
        ("affinity: {numa_binding: socket}\n", {}, "socket"),
        ("affinity: {numa_binding: none}\n", {"exclusive": True}, None),
    ],
)
def test_torchrun_binds_to_the_numa_nodes_of_the_gpus_where_the_job_has_all_cores(
    extra: str, options: dict[str, object], mode: str | None, here: Path
) -> None:
    text = script(here, extra, "torchrun", gpus_per_node=4, **options)
    assert (f'agent.sh" --numa-binding={mode} ' in text) is (mode is not None)
    assert ("--numa-binding" in text) is (mode is not None)


@pytest.mark.parametrize(("torch", "numactl"), [(True, True), (False, True), (True, False)])
def test_the_agent_gets_the_option_where_its_torch_and_numactl_have_it(
    torch: bool, numactl: bool, tmp_path: Path
) -> None:
    (tmp_path / "torch/numa").mkdir(parents=True)
    (tmp_path / "torch/__init__.py").touch()
    if torch:
        (tmp_path / "torch/numa/binding.py").touch()
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("bash", "hostname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    if numactl:
        (tools / "numactl").symlink_to("/bin/true")
    (tmp_path / "agent.py").write_text("import sys\nprint(sys.argv[1:])\n")
    agent = [sys.executable, *module_words("agent"), "--nnodes=1", "--no-python", "prog"]
    done = subprocess.run(
        ["bash", str(data_folder("templates") / "shell/agent.sh"), "--numa-binding=node", *agent],
        env={"PATH": str(tools), "PYTHONPATH": str(tmp_path), "HPCJOBS_SCHEDULER": "local", "HOME": os.environ["HOME"]},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert ("'--numa-binding=node'" in done.stdout) is (torch and numactl), done
    assert ("no --numa-binding=node: it needs" in done.stderr) is not (torch and numactl)


def test_explain_shows_what_binds_the_ranks_and_why(here: Path) -> None:
    (here / "x.yaml").write_text(SLURM + "affinity: {gpu_bind: closest}\n", encoding="utf-8")
    answer = within("submit", "--site", "./x.yaml", "--gpus-per-node", "4", "--explain", "--dry-run", "./p")
    rows = [line.split() for line in answer.out.splitlines() if line.startswith("affinity.")]
    assert rows == [
        ["affinity.cpu_bind", "cores", "default", "with", "GPUs"],
        ["affinity.distribution", "block:block", "default", "with", "GPUs"],
        ["affinity.gpu_bind", "closest", "site", "x"],
    ]


def test_a_binding_that_torchrun_has_not_is_refused_by_name(here: Path) -> None:
    with pytest.raises(ConfigError, match="numa_binding"):
        script(here, "affinity: {numa_binding: cores}\n", "torchrun")
