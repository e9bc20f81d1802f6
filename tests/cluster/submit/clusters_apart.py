"""Clusters that know nothing of each other, on one machine: each a sandbox in namespaces of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from commandline import Answer

_SITE = "{description: two nodes, partitions: {main: {nodes: 2, node: {cpus: 4, mem: 4G}}}, defaults: {time: 10m}}\n"
SITE = "shared"
_START = """
mount -t tmpfs tmpfs "$changed"
mkdir "$changed/etc" "$changed/work"
cp /etc/hosts "$changed/etc/"
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$changed/etc,workdir=$changed/work" /etc
ip link set lo up
hostname "$name"
python=$1
"$python" -m hpcjobs sandbox up --like "$name" >&2
mkdir -p /etc/slurm
ln -sfn "$HPCJOBS_SANDBOX_ROOT/etc/slurm.conf" /etc/slurm/slurm.conf
echo up
exec sleep infinity
"""


class ClusterApart:
    """A cluster whose commands find it at /etc/slurm/slurm.conf, as on its own login node."""

    def __init__(self, name: str, init: int, environment: dict[str, str]) -> None:
        self.name = name
        self._init, self._environment = init, environment

    def run(self, *argv: str) -> Answer:
        """``argv`` on the login node."""
        inside = [
            "nsenter",
            "-t",
            str(self._init),
            "--mount",
            "--net",
            "--pid",
            "--uts",
            "--wdns=" + os.getcwd(),
            *argv,
        ]
        done = subprocess.run(inside, env=self._environment, capture_output=True, text=True, check=False, timeout=500)
        return Answer(done.returncode, done.stdout, done.stderr)

    def python(self, script: str, *arguments: str) -> str:
        answer = self.run(sys.executable, "-c", script, *arguments)
        assert answer.code == 0, answer
        return answer.out

    def hpcjobs(self, *arguments: str) -> Answer:
        return self.run(sys.executable, "-m", "hpcjobs", *arguments)

    def rows(self) -> list[dict[str, Any]]:
        """What ``hpcjobs ps`` lists."""
        answer = self.hpcjobs("ps", "-a", "--site", SITE, "--json")
        assert answer.code == 0, answer
        document: list[dict[str, Any]] = answer.json
        return document

    def queue(self) -> dict[str, str]:
        """Id and name of what is in the queue, as Slurm itself says."""
        answer = self.run("squeue", "--noheader", "--format=%i %j")
        assert answer.code == 0, answer
        return dict(line.split(" ", 1) for line in answer.out.splitlines())


@contextmanager
def cluster_apart(name: str, folder: Path) -> Iterator[ClusterApart]:
    """A sandbox with ClusterName ``name``; ``folder`` is seen by its hosts and gets the site files."""
    (folder / "site_configs").mkdir(exist_ok=True)
    for site in (name, SITE):
        (folder / "site_configs" / f"{site}.yaml").write_text(_SITE, encoding="utf-8")
    root = Path(f"/var/lib/hpcjobs-sandbox-{name}-{os.getpid()}")
    changed = folder / f"etc-{name}"
    changed.mkdir()
    environment = os.environ | {"HPCJOBS_SANDBOX_ROOT": str(root), "changed": str(changed), "name": name}
    own = ["unshare", "--mount", "--propagation", "private", "--net", "--pid", "--uts", "--cgroup", "--fork"]
    argv = [*own, "--kill-child", "--mount-proc", "bash", "-ec", _START, "bash", sys.executable]
    holder = subprocess.Popen(argv, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "up\n"
        (init,) = Path(f"/proc/{holder.pid}/task/{holder.pid}/children").read_text().split()
        cluster = ClusterApart(name, int(init), environment)
        try:
            yield cluster
        finally:
            cluster.hpcjobs("sandbox", "down")
    finally:
        holder.kill()
        holder.communicate(timeout=240)
