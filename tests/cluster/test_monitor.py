"""`hpcjobs monitor` on a real Slurm: a sampler on every node of a job of any program, beside its tasks."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

from commandline import ok, start
from waiting import eventually

from hpcjobs.sandbox import Sandbox


def write_program(workdir: Path) -> Path:
    """A program of four tasks that runs until a file `go` is there."""
    program = workdir / "program.sh"
    text = "#!/bin/bash\n: >started-${RANK:-$SLURM_PROCID}\nuntil [ -e go ]; do sleep 0.2; done\n"
    program.write_text(text)
    program.chmod(0o755)
    return program


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
