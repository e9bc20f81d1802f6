"""A laptop that has nothing of the cluster but ssh to its login host."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from commandline import Answer, await_answer
from laptop import LOGIN, laptop
from shared import shared_folder
from wheelhouse import write_wheels

from hpcjobs.sandbox import Sandbox

PROGRAMS = ("bash", "sh", "env", "rsync", "git", "curl")
"""All that a laptop has besides ssh and Python; sbatch is none of them."""
_NSENTER, _UNSHARE, _MOUNT = (shutil.which(name) or name for name in ("nsenter", "unshare", "mount"))
LINK_ADDRESS = "10.79.0.1"


@dataclass(frozen=True)
class Desk:
    """A user at a laptop: a home, a folder of code, and commands that see nothing of the login host's files."""

    net: Path
    home: Path
    code: Path
    far: Path
    """The login host's home, which the laptop does not see."""
    keys: Path

    @property
    def _inside(self) -> list[str]:
        hide = f'{_MOUNT} -t tmpfs tmpfs {self.far}; exec "$@"'
        return ["nsenter", f"--net={self.net}", "--", _UNSHARE, "--mount", "--", "/bin/sh", "-c", hide, "sh"]

    def environment(self, **more: str) -> dict[str, str]:
        left_out = ("SLURM_", "HPCJOBS_", "XDG_", "SSH_")
        own = {name: value for name, value in os.environ.items() if not name.startswith(left_out)}
        return own | {"HOME": str(self.home), "PATH": str(self.home / "bin"), **more}

    def start(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """``hpcjobs ARGUMENTS`` typed into the folder of code, begun."""
        env = self.environment(**options.pop("env", {}))
        argv = [*self._inside, sys.executable, "-m", "hpcjobs", *arguments]
        pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        program = {"executable": _NSENTER}
        return subprocess.Popen(argv, cwd=self.code, env=env, text=True, **{**pipes, **program, **options})

    def hpcjobs(self, *arguments: str, env: Mapping[str, str] | None = None, timeout_s: float = 300) -> Answer:
        """``hpcjobs ARGUMENTS`` to its end."""
        return await_answer(self.start(*arguments, env=env or {}), timeout_s=timeout_s)

    def status(self, url: str) -> str:
        """The HTTP status that ``url`` gives on the laptop; 000: nobody answers."""
        argv = [
            *self._inside,
            "curl",
            "--silent",
            "--show-error",
            "--output",
            "/dev/null",
            "--write-out",
            "%{http_code}",
            url,
        ]
        env = self.environment()
        return subprocess.run(argv, executable=_NSENTER, env=env, stdout=subprocess.PIPE, text=True).stdout

    def write_ssh_config(self, text: str = "") -> None:
        """The user's own configuration of ssh: ``text`` before what all hosts have."""
        (self.home / "ssh_config").write_text(
            f"{text}\nHost {LOGIN}\n  HostName {LINK_ADDRESS}\nHost *\n  Port 2222\n  User root\n"
            f"  IdentityFile {self.keys / 'user_key'}\n  IdentitiesOnly yes\n  StrictHostKeyChecking accept-new\n"
            f"  UserKnownHostsFile {self.home / 'known_hosts'}\n"
        )

    def write_site(self, name: str, **fields: object) -> None:
        """A site file of the user's on the laptop."""
        folder = self.home / ".config" / "hpcjobs" / "site_configs"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.yaml").write_text(json.dumps(fields))

    def close(self) -> None:
        """End the connections that stay open for the next command."""
        for socket in (self.home / ".cache" / "hpcjobs" / "ssh").glob("*"):
            argv = [*self._inside, "ssh", "-o", f"ControlPath={socket}", "-O", "exit", LOGIN]
            subprocess.run(argv, executable=_NSENTER, env=self.environment(), capture_output=True)


@pytest.fixture(scope="session")
def far(sandbox: Sandbox) -> Iterator[Path]:
    """The home of the user on the login host, where pip finds wheels in a folder."""
    if not Path("/usr/sbin/sshd").exists():
        pytest.skip("no /usr/sbin/sshd: make test installs it as root")
    with shared_folder() as folder:
        (folder / "wheels").mkdir()
        write_wheels(folder / "wheels")
        (folder / "bin").mkdir()
        (folder / ".bash_profile").write_text(
            f"echo Welcome to the login host\nexport PATH={folder}/bin:$PATH HPCJOBS_SANDBOX_ROOT=/nowhere\n"
            f"export PIP_NO_INDEX=1 PIP_FIND_LINKS={folder}/wheels\n"
            f"[ ! -e {folder}/profile ] || . {folder}/profile\n"
        )
        yield folder


@pytest.fixture(scope="session")
def network(far: Path) -> Iterator[Path]:
    """The laptop's network and keys, and the sshd of the login host."""
    with shared_folder() as folder, laptop(folder, login_environment={"HOME": str(far)}):
        yield folder


@pytest.fixture
def desk(far: Path, network: Path, sandbox: Sandbox, tmp_path: Path) -> Iterator[Desk]:
    """A laptop with a site named far, whose login host gets hpcjobs from it."""
    home, code = Path(tempfile.mkdtemp(prefix="h-", dir="/tmp")), tmp_path / "my code"  # short, for ssh's sockets
    (home / "bin").mkdir()
    code.mkdir()
    for name in PROGRAMS:
        (home / "bin" / name).symlink_to(str(shutil.which(name)))
    ssh = home / "bin" / "ssh"
    ssh.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {home / "ssh_config"} "$@"\n')
    ssh.chmod(0o755)
    user = Desk(network / "net", home, code, far, network)
    user.write_ssh_config()
    fields = {
        "partitions": {"compute": {"nodes": 4, "node": {"cpus": 16}}},
        "defaults": {"time": "10m", "mem": "500M"},
        "slurm_conf": sandbox.slurm_conf,
        "node_local": ["/tmp"],
        "jupyter": {"python": sys.executable},
    }
    user.write_site("far", **fields, login={"host": LOGIN, "python": sys.executable})
    user.write_site("full", **fields, login={"host": LOGIN, "command": f"{sys.executable} -m hpcjobs"})
    yield user
    user.close()
    shutil.rmtree(home)
    (far / "profile").unlink(missing_ok=True)
