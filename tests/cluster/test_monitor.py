"""`hpcjobs monitor` on a real Slurm: a sampler on every node of a job of any program, beside its tasks."""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commandline import ok, start
from waiting import eventually

from hpcjobs.sandbox import Sandbox
from hpcjobs.slurm_commands import hosts_of


def write_program(workdir: Path) -> Path:
    """A program of four tasks that runs until a file `go` is there."""
    program = workdir / "program.sh"
    text = "#!/bin/bash\n: >started-${RANK:-$SLURM_PROCID}\nuntil [ -e go ]; do sleep 0.2; done\n"
    program.write_text(text)
    program.chmod(0o755)
    return program


NVML = """
#include <stdio.h>
#include <stdlib.h>
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { *handle = (void *)8; return index ? 2 : 0; }
int nvmlDeviceGetHandleByUUID(const char *name, void **handle) { return 2; }
int nvmlDeviceGetMemoryInfo(void *handle, void *memory) { return 3; }
int nvmlDeviceGetPowerUsage(void *handle, unsigned *milliwatts) { return 3; }
int nvmlDeviceGetTemperature(void *handle, int sensor, unsigned *degrees) { return 3; }
int nvmlDeviceGetUtilizationRates(void *handle, unsigned *percents) {
    char path[4096];
    snprintf(path, sizeof path, "%s/gpu-of-%s", getenv("GPU_FOLDER"), getenv("SLURMD_NODENAME"));
    FILE *file = fopen(path, "r");
    percents[0] = percents[1] = 0;
    if (file && fscanf(file, "%u", percents) == 1) fclose(file);
    return 0;
}
"""
"""NVIDIA's management library with one GPU per node, whose utilisation a file of the node says; without it 0 %."""


@pytest.fixture
def gpus(workdir: Path) -> dict[str, str]:
    """The environment in which a sampler sees such GPUs."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler on this machine")
    (workdir / "nvml.c").write_text(NVML)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "libnvidia-ml.so.1", "nvml.c"], cwd=workdir, check=True)
    return {"CUDA_VISIBLE_DEVICES": "0", "LD_LIBRARY_PATH": str(workdir), "GPU_FOLDER": str(workdir)}


def newest(folder: Path) -> list[dict[str, object]]:
    """The last sample of each of two nodes that has one."""
    paths = [folder / "monitor.jsonl", folder / "monitor-1.jsonl"]
    lines = [[json.loads(line) for line in path.read_text().splitlines()] for path in paths if path.exists()]
    samples = [[line for line in some if line["kind"] == "sample"] for some in lines]
    return [some[-1] for some in samples if some]


def test_a_job_submitted_with_monitor_has_a_sampler_on_each_node_until_it_ends(sandbox: Sandbox, workdir: Path) -> None:
    arguments = ("--site", "tu-hpc", "--nodes", "2", "--ntasks-per-node", "2", "--time", "10m", "--name", "sampled")
    job = ok("submit", *arguments, "--monitor", "--json", str(write_program(workdir))).json
    folder = Path(job["run_dir"])
    eventually(lambda: [sample.get("ranks") for sample in newest(folder)] == [4, 4], what="a sampler on each node")
    assert len({node["host"] for node in ok("show", "sampled", "--json").json["monitor"]}) == 2
    (workdir / "go").touch()
    assert ok("wait", "sampled").code == 0
    assert "srun" not in (folder / "logs" / f"sampled_{job['job_id']}.out").read_text()


def test_a_job_of_sbatch_alone_is_sampled_by_its_id(sandbox: Sandbox, workdir: Path) -> None:
    program = write_program(workdir)
    arguments = ("sbatch", "--parsable", "-N", "2", "--ntasks-per-node=2", "-t", "10", f"--wrap=srun {program}")
    env = {**os.environ, "SLURM_CONF": sandbox.slurm_conf}
    job_id = subprocess.run(arguments, env=env, capture_output=True, text=True, check=True).stdout.strip()
    eventually(lambda: len(list(workdir.glob("started-*"))) == 4)
    watcher = start("monitor", job_id, "--site", "tu-hpc", "--interval", "1")
    folder = workdir / "runs" / f"monitor-{job_id}"
    eventually(lambda: [sample.get("ranks") for sample in newest(folder)] == [4, 4], what="a sampler on each node")
    (workdir / "go").touch()
    out, err = watcher.communicate(timeout=300)
    assert watcher.returncode == 0, err
    assert len({line.split()[0] for line in out.splitlines()}) == 2


def test_every_node_of_a_job_of_any_program_is_sampled_beside_its_tasks(sandbox: Sandbox, workdir: Path) -> None:
    program = workdir / "program.sh"
    program.write_text("#!/bin/bash\n: >started-$RANK\nuntil [ -e go ]; do sleep 0.2; done\n")
    program.chmod(0o755)
    arguments = ("--site", "tu-hpc", "--nodes", "2", "--ntasks-per-node", "2", "--time", "10m", "--name", "any")
    job = ok("submit", *arguments, "--json", str(program)).json
    eventually(lambda: len(list(workdir.glob("started-*"))) == 4)
    watcher = start("monitor", "any", "--interval", "1")
    run_dir = Path(job["run_dir"])

    def newest() -> list[dict[str, object]]:
        paths = [run_dir / "monitor.jsonl", run_dir / "monitor-1.jsonl"]
        lines = [path.read_text().splitlines() for path in paths if path.exists()]
        return [json.loads(some[-1]) for some in lines if len(some) > 1]

    # The sandbox's hosts see each other's processes, so each of them counts all four ranks.
    eventually(lambda: [sample.get("ranks") for sample in newest()] == [4, 4], what="a sampler on each node")
    assert len({node["host"] for node in ok("show", "any", "--json").json["monitor"]}) == 2
    assert watcher.stdout is not None
    hosts = {watcher.stdout.readline().split()[0] for _ in range(8)}
    assert len(hosts) == 2
    (workdir / "go").touch()
    _, err = watcher.communicate(timeout=300)
    assert watcher.returncode == 0, err
    assert ok("wait", "any").code == 0


def test_a_slow_node_is_named_and_a_job_is_cancelled_once_the_gpus_of_all_its_nodes_are_idle(
    sandbox: Sandbox, workdir: Path, gpus: dict[str, str]
) -> None:
    arguments = ("--site", "tu-hpc", "--nodes", "2", "--ntasks-per-node", "1", "--time", "10m", "--name", "held")
    ok("submit", *arguments, str(write_program(workdir)))
    eventually(lambda: len(list(workdir.glob("started-*"))) == 2)
    first, second = sorted(hosts_of(ok("ps", "--json").json[0]["record"]["node_list"]))
    busy = workdir / f"gpu-of-{first}"
    busy.write_text("95")
    watcher = start("monitor", "held", "--interval", "1", "--cancel-idle", "5s", env=gpus)
    assert watcher.stdout is not None
    lines = list(itertools.islice(watcher.stdout, 12))  # six samples of each node
    alarms = [line for line in lines if line.startswith("alarm: ")]
    assert f"alarm: {first}: busy (95 %) while the other nodes wait (0 %): it may be slow\n" in alarms
    assert any(line.startswith(f"{second} ") and "GPU 0 %" in line for line in lines)
    busy.unlink()
    out, err = watcher.communicate(timeout=300)
    assert watcher.returncode == 0, err
    assert "all its nodes idle for" in out
    eventually(lambda: ok("ps", "--json").json[0]["record"]["state"] == "CANCELLED")


def test_memory_close_to_what_the_job_requested_is_an_alarm_where_no_control_group_limits_it(
    sandbox: Sandbox, workdir: Path
) -> None:
    program = 'import time; held = bytearray(b"1") * (190 << 20); open("started-0", "w").close(); time.sleep(600)'
    arguments = ("--site", "tu-hpc", "--mem", "200M", "--time", "10m", "--name", "hungry")
    ok("submit", *arguments, sys.executable, "-c", program)
    eventually((workdir / "started-0").exists)
    watcher = start("monitor", "hungry", "--interval", "1")
    try:
        assert watcher.stdout is not None
        alarm = next(line for line in watcher.stdout if line.startswith("alarm: "))
        assert re.fullmatch(r"alarm: tu\d\d: memory [\d.]+M of 200M\n", alarm)
    finally:
        ok("cancel", "hungry")
        watcher.communicate(timeout=300)


def test_a_job_that_is_requeued_is_sampled_in_its_next_attempt_too(sandbox: Sandbox, workdir: Path) -> None:
    arguments = ("--site", "tu-hpc", "--time", "10m", "--name", "again", "-o", "requeue=1", "--json")
    job_id = ok("submit", *arguments, str(write_program(workdir))).json["job_id"]
    eventually(lambda: len(list(workdir.glob("started-*"))) == 1)
    watcher = start("monitor", "again", "--interval", "1")
    assert watcher.stdout is not None
    assert watcher.stderr is not None
    assert "CPU" in watcher.stdout.readline()
    assert ok("requeue", job_id).code == 0
    assert f"nobody sampled job {job_id} any more: its sampling begins again" in watcher.stderr.readline()
    (workdir / "go").touch()
    watcher.communicate(timeout=300)
    assert watcher.returncode == 0
