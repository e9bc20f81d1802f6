"""A centre with one read-only installation, one site file with a policy, and three ordinary users."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from commandline import Answer, hpcjobs, ok

import hpcjobs as package
from hpcjobs.sandbox import Sandbox

USERS = ("daemon", "bin", "sys")
"""Users of every Debian that are not among the people who may submit from the start."""
POLICY = """
policy:
  max_nodes: 2
  max_time: 2h
  mandatory: {comment: centre}
  messages: ["Welcome to the centre"]
"""
READ_ONLY = 'mount --bind "$0" "$0" && mount -o remount,bind,ro "$0" && exec "$@"'


@dataclass(frozen=True)
class Member:
    """An ordinary user, for whom the installation is a read-only mount."""

    name: str
    folder: Path
    installation: Path
    env: dict[str, str]

    def hpcjobs(self, *arguments: str, cwd: Path | None = None) -> Answer:
        ids = [f"--reuid={self.name}", f"--regid={pwd.getpwnam(self.name).pw_gid}", "--clear-groups"]
        # May read everything: this Python can lie in root's home.
        user = ["setpriv", *ids, "--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        mount = ["unshare", "--mount", "--propagation", "private", "sh", "-c", READ_ONLY, str(self.installation)]
        command = [*mount, *user, sys.executable, "-m", "hpcjobs", *arguments]
        done = subprocess.run(
            command, cwd=cwd or self.folder, env=self.env, capture_output=True, text=True, timeout=200
        )
        return Answer(done.returncode, done.stdout, done.stderr)

    def write(self, name: str, text: str, folder: Path | None = None) -> Path:
        path = (folder or self.folder / ".config" / "hpcjobs" / "site_configs") / f"{name}.yaml"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        subprocess.run(["chown", "-R", f"{self.name}:", str(self.folder)], check=True)
        return path


@pytest.fixture
def centre(sandbox: Sandbox, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The centre's site file, written from the cluster, with a policy."""
    monkeypatch.setenv("SLURM_CONF", sandbox.slurm_conf)
    path = workdir / "xdg" / "hpcjobs" / "site_configs" / "big.yaml"
    ok("sites", "init", "--file", str(path))
    path.write_text(path.read_text(encoding="utf-8") + POLICY, encoding="utf-8")
    return path


@pytest.fixture
def members(centre: Path, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> list[Member]:
    """Three users, each with a home of their own, and the installation that they share."""
    assert hpcjobs("sandbox", "add-user", *USERS).code == 0
    root = Path(package.__file__).parent.parent
    installation = workdir / "apps"
    for part in ("hpcjobs", "templates", "site_configs"):
        shutil.copytree(root / part, installation / part, ignore=shutil.ignore_patterns("__pycache__"))
    workdir.chmod(0o755)
    env = {name: value for name, value in os.environ.items() if not name.startswith("XDG_")}
    env["HPCJOBS_SANDBOX_ROOT"] = str(workdir / "none")  # a cluster like any other, which nobody rehearses
    members = []
    for name in USERS:
        home = workdir / f"home-{name}"
        home.mkdir()
        shutil.chown(home, name)
        own = {"HOME": str(home), "USER": name, "LOGNAME": name, "PYTHONPATH": str(installation)}
        members.append(Member(name, home, installation, env | own | {"XDG_CONFIG_DIRS": str(workdir / "xdg")}))
    return members


@pytest.mark.timeout(400)
def test_each_user_of_a_centre_gets_what_they_should_and_a_hostile_file_of_a_repository_nothing(
    centre: Path, members: list[Member], workdir: Path
) -> None:
    extends, exceeds, without = members
    line = centre.read_text(encoding="utf-8").splitlines().index("  max_nodes: 2") + 1

    extends.write("mine", "extends: big\nsetup: ['export WHO=extended']\n")
    answer = extends.hpcjobs("submit", "--wait", "--json", "sh", "-c", 'echo "$WHO on $SLURM_JOB_NUM_NODES"')
    assert answer.code == 0, answer
    assert "Welcome to the centre" in answer.err
    logs = extends.hpcjobs("logs", answer.json["job_id"])
    assert "extended on 1" in logs.out, "a file that extends the centre's is chosen, and its line is run"
    assert not list(members[0].installation.rglob("__pycache__")), "the installation is read-only"

    exceeds.write("mine", "extends: big\ndefaults: {nodes: 3}\n")
    answer = exceeds.hpcjobs("submit", "true")
    assert answer.code == 5, answer
    assert f"nodes=3 (site mine): at most 2 nodes ({centre}:{line})" in answer.err

    stated = "partitions: {short: {nodes: 4, node: {cpus: 1}}}\ndefaults: {time: 9h}\n"
    without.write("own", f"{stated}cluster: other\nslurm_conf: {without.env['SLURM_CONF']}\n")
    answer = without.hpcjobs("submit", "--site", "own", "true")
    assert answer.code == 5, answer
    assert "at most 02:00:00" in answer.err, "a file that has nothing to do with the centre's comes under its policy"
    answer = without.hpcjobs("submit", "--site", "own", "-t", "10m", "--dry-run", "true")
    assert "#SBATCH --comment=centre" in answer.out, answer

    repository = extends.folder / "cloned"
    marker = workdir / "marker"
    evil = extends.write("big", f"extends: big\nsetup: ['touch {marker}']\n", repository / "site_configs")
    answer = extends.hpcjobs("submit", "--site", "big", "--wait", "true", cwd=repository)
    assert answer.code == 4, answer
    assert f"site big is {evil}, which shadows {centre}" in answer.err
    assert f"{evil}:2: setup" in answer.err
    assert not marker.exists()
    answer = extends.hpcjobs("submit", "--wait", "true", cwd=repository)
    assert answer.code == 0, answer
    assert not marker.exists(), "where no site is named, a repository's comes last"
