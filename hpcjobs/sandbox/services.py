"""Starts each daemon and waits until it answers, in the order in which they need each other."""

from __future__ import annotations

import os
import pwd
import secrets
import shutil
from collections.abc import Sequence
from pathlib import Path

from hpcjobs.errors import HpcJobsError
from hpcjobs.process import Result, run
from hpcjobs.sandbox import slurm_files as files
from hpcjobs.sandbox.daemons import Daemon, listening, program, spawn, until
from hpcjobs.sandbox.folder import Folder, write
from hpcjobs.sandbox.models import Host, Layout
from hpcjobs.sandbox.network import CONTROLLER, enter, must
from hpcjobs.units import slurm_time, walltime_s

_DATABASE = (
    "--no-defaults",
    "--user=mysql",
    "--bind-address=127.0.0.1",
    "--skip-name-resolve",
    "--performance-schema=OFF",
    "--max-connections=64",
    "--innodb-buffer-pool-size=256M",
    "--innodb-lock-wait-timeout=900",
    "--innodb-log-file-size=64M",
    # Nothing here outlives the machine: no flush to disk per transaction.
    "--innodb-flush-log-at-trx-commit=0",
    "--innodb-doublewrite=0",
)
# In a mount namespace of its own: folders that every host has for itself, then slurmd under the same pid.
_NODE_SCRIPT = """\
mount --bind "$1/tmp" /tmp && mount --bind "$1/vartmp" /var/tmp &&
mount -t tmpfs -o mode=1777 hpcjobs-shm /dev/shm && shift && exec "$@"
"""
PRIVATE = ("tmp", "vartmp")


def start_munge(folder: Folder) -> Daemon:
    """A munged of our own, with its own key: one that this machine has is left alone."""
    home = _folder_of(folder.munge_socket.parent, user="munge", mode=0o755)
    key = home / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(secrets.token_bytes(128))
    _give(key, user="munge")
    argv = [program("setpriv"), "--reuid=munge", "--regid=munge", "--init-groups", program("munged"), "--foreground"]
    argv += [f"--socket={folder.munge_socket}", f"--key-file={key}", f"--pid-file={home}/munged.pid"]
    argv += [f"--log-file={home}/munged.log", f"--seed-file={home}/munged.seed", "--num-threads=4"]
    daemon = spawn(folder, "munged", [*enter(folder), *argv])
    probe = [program("munge"), "--no-input", f"--socket={folder.munge_socket}"]
    until(lambda: folder.munge_socket.exists() and run(probe).code == 0, what="munge credential", watch=[daemon])
    return daemon


def start_database(folder: Folder, password: str) -> Daemon:
    """A MariaDB of our own in ``folder``: own data, own socket, own port."""
    data = _folder_of(folder.database, user="mysql", mode=0o700)
    install = ["mariadb-install-db", "--no-defaults", "--user=mysql", f"--datadir={data}", "--skip-test-db"]
    must([*install, "--innodb-log-file-size=64M", "--innodb-flush-log-at-trx-commit=0"])
    init = folder.database / "init.sql"
    write(init, files.database_init(password), mode=0o600)
    _give(init, user="mysql")
    argv = [program("mariadbd"), *_DATABASE, f"--datadir={data}", f"--socket={data}/mariadb.socket"]
    argv += [f"--pid-file={data}/mariadbd.pid", f"--port={files.DATABASE_PORT}", f"--init-file={init}"]
    daemon = spawn(folder, "mariadbd", [*enter(folder), *argv])
    until(lambda: listening("127.0.0.1", files.DATABASE_PORT), what="MariaDB", watch=[daemon])
    return daemon


def start_accounting(folder: Folder) -> Daemon:
    daemon = spawn(folder, "slurmdbd", [*enter(folder), program("slurmdbd"), "-D"])
    until(lambda: listening(CONTROLLER, files.ACCOUNTING_PORT), what="slurmdbd", watch=[daemon])
    return daemon


def start_controller(folder: Folder) -> Daemon:
    argv = [program("slurmctld"), "-D", "-f", str(folder.slurm_conf)]
    daemon = spawn(folder, "slurmctld", [*enter(folder), *argv])
    until(lambda: listening(CONTROLLER, files.CONTROLLER_PORT), what="slurmctld", watch=[daemon])
    return daemon


def start_node(folder: Folder, host: Host) -> Daemon:
    """slurmd of one host; it does not wait for it."""
    for name in PRIVATE:
        private = folder.private(host.name, name)
        private.mkdir(parents=True)
        private.chmod(0o1777)
    folder.spool(host.name).mkdir()
    home = folder.private(host.name, "tmp").parent
    argv = [program("unshare"), "--mount", "--propagation", "private", program("sh"), "-c", _NODE_SCRIPT, "sh"]
    argv += [str(home), program("slurmd"), "-D", "-N", host.name, "-f", str(folder.slurm_conf)]
    return spawn(folder, f"slurmd-{host.name}", [*enter(folder, host), *argv])


def node_states(folder: Folder) -> dict[str, str]:
    """Host -> state, as sinfo names it; empty when the controller does not answer."""
    done = slurm(folder, ["sinfo", "--noheader", "--Node", "--format=%N %T"])
    return dict(line.split() for line in done.out.splitlines()) if done.code == 0 else {}


def slurm(folder: Folder, argv: Sequence[str]) -> Result:
    """Run a Slurm command against this sandbox, whatever SLURM_CONF says."""
    return run([program("env"), f"SLURM_CONF={folder.slurm_conf}", program(argv[0]), *argv[1:]])


def fill_accounting(folder: Folder, layout: Layout) -> None:
    """Cluster, QOS with their limits, accounts, and the users who may submit: root and who called sudo."""
    change = ["sacctmgr", "--immediate", "--quiet"]
    users = ",".join(dict.fromkeys(["root", os.environ.get("SUDO_USER", "root")]))
    accounts = ",".join(layout.accounts)
    _slurm_must(folder, [*change, "add", "cluster", layout.cluster])
    if others := [name for name in layout.qos if name != "normal"]:
        _slurm_must(folder, [*change, "add", "qos", ",".join(others)])
    for name, limit in layout.qos.items():
        if limit:
            wall = f"MaxWall={slurm_time(walltime_s(limit))}"
            _slurm_must(folder, [*change, "modify", "qos", name, "set", wall, "Flags=DenyOnLimit"])
    owned = [f"cluster={layout.cluster}", f"qos={','.join(layout.qos)}", "defaultqos=normal"]
    _slurm_must(folder, [*change, "add", "account", accounts, *owned])
    default = f"defaultaccount={layout.accounts[0]}"
    _slurm_must(folder, [*change, "add", "user", users, f"account={accounts}", default, *owned])


def _slurm_must(folder: Folder, argv: Sequence[str]) -> None:
    done = slurm(folder, argv)
    if done.code != 0:
        raise HpcJobsError(f"{' '.join(argv)}: exit code {done.code}\n{(done.err or done.out).strip()}")


def _folder_of(path: Path, *, user: str, mode: int) -> Path:
    path.mkdir()
    path.chmod(mode)
    _give(path, user=user)
    return path


def _give(path: Path, *, user: str) -> None:
    owner = pwd.getpwnam(user)
    os.chown(path, owner.pw_uid, owner.pw_gid)


def clear(folder: Folder) -> None:
    """Empty the folder except for its mark: what a daemon of before left must not meet a new one."""
    for entry in folder.root.iterdir():
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        elif not entry.name.startswith(".hpcjobs"):
            entry.unlink()
