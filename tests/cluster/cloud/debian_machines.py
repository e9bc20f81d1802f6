"""Machines on which start-up scripts run for real: layers over a Debian root, in namespaces of their own."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from waiting import eventually

SCRIPT = Path(__file__).with_name("machines.sh")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class Machine:
    """One of them, while it runs."""

    def __init__(self, name: str, pid: int, root: Path) -> None:
        self.name, self._pid, self._root = name, pid, root

    def start(self, *arguments: str, user: str = "root", **env: str) -> subprocess.Popen[str]:
        """Start a program in it, with no variables but ``env``."""
        inside = ["nsenter", "--target", str(self._pid), "--mount", "--uts", "--ipc", "--net", "--pid"]
        become = [] if user == "root" else ["runuser", "-u", user, "--"]
        home = "/root" if user == "root" else f"/shared/home/{user}"
        values = {"PATH": PATH, "HOME": home, "USER": user, **env}
        environment = ["env", "-i", *(f"{k}={values[k]}" for k in values)]
        return subprocess.Popen(
            [*inside, "chroot", str(self._root), *environment, *become, *arguments],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip

    def run(self, *arguments: str, user: str = "root", code: int = 0, **env: str) -> str:
        """What a program in it prints; it must end with ``code``."""
        process = self.start(*arguments, user=user, **env)
        out, _ = process.communicate()
        assert process.returncode == code, f"{self.name}: {' '.join(arguments)} ended with {process.returncode}\n{out}"
        return out


@contextmanager
def machines(names: Sequence[str], work: Path, base: Path) -> Iterator[Mapping[str, Machine]]:
    """Machines with a root like ``base``, which stays as it is; all they wrote is gone at the end, but work/shared."""
    alone = ["unshare", "--mount", "--net", "--propagation", "private"]
    with (work / "machines.log").open("wb") as log:
        keeper = subprocess.Popen(
            [*alone, "bash", str(SCRIPT), str(work), str(base), *names],
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        while not (work / "ready").exists():
            assert keeper.poll() is None, (work / "machines.log").read_text()
            time.sleep(0.05)
        pids = {name: int((work / "pids" / name).read_text()) for name in names}
        yield {name: Machine(name, pid, work / "layers" / name / "root") for name, pid in pids.items()}
    finally:
        os.killpg(keeper.pid, signal.SIGKILL)  # the first process of each machine goes with it, and so all others
        keeper.wait()
        _remove_cgroups(names)


def _remove_cgroups(names: Sequence[str]) -> None:
    """The groups that ``machines.sh`` made, with Slurm's inside them: they stay when their processes are gone."""
    for name in names:
        for top in [*Path("/sys/fs/cgroup").glob(f"*/hpcjobs-{name}"), Path(f"/sys/fs/cgroup/hpcjobs-{name}")]:
            eventually(lambda top=top: _remove_empty(top), what=f"the end of every process of {name}")


def _remove_empty(top: Path) -> bool:
    """Remove a group with those inside it; False while a process of it is still ending."""
    try:
        for folder, _, _ in os.walk(top, topdown=False):
            os.rmdir(folder)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        return False
    return True
