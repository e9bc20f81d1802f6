"""A run folder on 50 MB that fill up, on a real Slurm: first by the run's own checkpoints, then by somebody else."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from login_node import Cluster, Submitted
from waiting import eventually

from hpcjobs.runtime import checkpoints
from hpcjobs.sandbox import Sandbox
from hpcjobs.sandbox.folder import folder_at, recorded_daemons

# 1.6 MB a checkpoint, and a hundred of them wanted: no disk of 50 MB has room for these.
TRAINING = ("ddp", "--workload", "lm", "--steps", "400", "--log-every", "1", "--no-probe")
CHECKPOINTS = ("--checkpoint-every", "4", "--checkpoint-keep", "100")
SIZE = 50 * 2**20


class SmallDisk:
    """50 MB that one host mounts on a job's run folder, before the job starts; seen through that host's slurmd."""

    def __init__(self, host: str, run_dir: Path) -> None:
        self._slurmd = next(
            daemon.pid for daemon in recorded_daemons(folder_at(None)) if daemon.name == f"slurmd-{host}"
        )
        self._run_dir = run_dir
        self.path = Path(f"/proc/{self._slurmd}/root{run_dir}")
        (run_dir / "logs").mkdir(exist_ok=True)
        self._there("mount", "-t", "tmpfs", "-o", f"size={SIZE}", "small-disk", str(run_dir))
        (self.path / "logs").mkdir()

    def _there(self, *argv: str) -> None:
        subprocess.run(["nsenter", "-t", str(self._slurmd), "-m", *argv], check=True)

    def fill(self) -> None:
        """Somebody else's file takes all that is left."""
        subprocess.run(["dd", "if=/dev/zero", f"of={self.path}/ballast", "bs=64K"], capture_output=True, check=False)

    def empty(self) -> None:
        (self.path / "ballast").unlink()

    def unmount(self) -> None:
        self._there("umount", "--lazy", str(self._run_dir))

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in sorted((self.path / "logs").iterdir()))

    def losses(self) -> dict[int, float]:
        return losses(self.path)


def losses(run_dir: Path) -> dict[int, float]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


def ended(cluster: Cluster, job: Submitted) -> bool:
    return not cluster.slurm("squeue", "-h", "-j", job.id).strip()


@pytest.mark.long
def test_on_a_disk_that_fills_up_the_run_goes_on_and_its_last_checkpoint_is_whole(
    cluster: Cluster, sandbox: Sandbox
) -> None:
    host = sandbox.hosts[-1].name
    alone = cluster.submit(*TRAINING)
    job = cluster.submit("-o", "hold", "-o", f"nodelist={host}", *TRAINING, *CHECKPOINTS)
    disk = SmallDisk(host, job.run_dir)
    try:
        cluster.slurm("scontrol", "release", job.id)
        eventually(lambda: "not written" in disk.log)
        disk.fill()
        eventually(lambda: ended(cluster, job), timeout_s=400)
        assert "No space left on device" in disk.log
        newest, *_ = checkpoints.steps(disk.path / checkpoints.FOLDER)
        assert checkpoints.damage(newest) is None
        step = int(newest.name.removeprefix("step-"))
        print(f"the disk was full: {newest.name} is whole;", disk.log.splitlines()[-3:])
        disk.empty()
        cluster.slurm("scontrol", "requeue", job.id)
        eventually(lambda: ended(cluster, job), timeout_s=400)
        assert f"step {step}" in disk.log
        assert json.loads((disk.path / "summary.json").read_text())["resumed_from_step"] == step
        alone.done()
        assert disk.losses() == losses(alone.run_dir)
    finally:
        disk.unmount()
