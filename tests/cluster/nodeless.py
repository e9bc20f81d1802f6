"""A slurmctld without a slurmd: its nodes are cloud nodes that never start, and it answers what may be submitted."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from waiting import eventually

from hpcjobs.sandbox import Sandbox, Shape
from hpcjobs.sandbox.folder import Folder
from hpcjobs.sandbox.layout import resolve_layout
from hpcjobs.sandbox.network import CONTROLLER
from hpcjobs.sandbox.services import ACCOUNTING_PORT, gres_conf, slurm_conf
from hpcjobs.site.library import load_site
from hpcjobs.site.models import Site
from hpcjobs.units import slurm_time, time_limit_s

CLUSTERS = Path(__file__).parents[1] / "data/clusters"
ACCOUNT, QOS = "sandbox", "open"
_PORT = 17830
_SETTINGS = """\
ClusterName={name}
SlurmctldHost={host}({address})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={munge}
SlurmctldPort={port}
SlurmdPort=17831
SlurmctldPidFile={home}/slurmctld.pid
StateSaveLocation={home}
SlurmctldLogFile={home}/log
MailProg=/bin/true
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerCPU=100
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={address}
AccountingStoragePort={dbd}
AccountingStoragePass={munge}
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
PrivateData=cloud
EnforcePartLimits=ALL
GresTypes=gpu
SuspendProgram=/bin/true
ResumeProgram=/bin/true
SuspendTime=600
ResumeTimeout=3600
"""


class Nodeless:
    """A cluster as its own slurmctld has it."""

    def __init__(self, conf: Path) -> None:
        self.env = {**os.environ, "SLURM_CONF": str(conf)}

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(arguments, env=self.env, capture_output=True, text=True, check=False)

    def submit(self, options: Sequence[str]) -> tuple[str | None, str]:
        """The job's id, or None; and what sbatch said. It is not to start: a node that starts is not there for others.

        ``--test-only`` would not do: of MaxMemPerCPU it takes no notice.
        """
        done = self.run("sbatch", "--parsable", "--chdir=/", "--begin=now+1day", *options, "--wrap=true")
        return (done.stdout.strip() if done.returncode == 0 else None), done.stderr.strip()

    def job(self, job_id: str) -> dict[str, str]:
        """What scontrol shows of a job, by name."""
        shown = self.run("scontrol", "--oneliner", "show", "job", job_id).stdout
        return dict(part.split("=", 1) for part in shown.split() if "=" in part)


def _cloud_lines(conf: str) -> list[str]:
    lines = conf.splitlines()
    # Without an address the controller looks every name up.
    cloud = f" State=CLOUD NodeAddr={CONTROLLER}"
    return [line + cloud if line.startswith("NodeName=") else line for line in lines]


def _gres_lines(lines: Sequence[str]) -> list[str]:
    pattern = re.compile(r"NodeName=(\S+) .*Gres=gpu:([\w.-]+):(\d+)")
    return [f"NodeName={m[1]} Name=gpu Type={m[2]} Count={m[3]}" for line in lines if (m := pattern.match(line))]


def manage(sandbox: Sandbox, *arguments: str) -> None:
    env = {**os.environ, "SLURM_CONF": sandbox.slurm_conf}
    command = ["sacctmgr", "--immediate", "--quiet", *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (command, done.stdout, done.stderr)


def _fill_accounting(sandbox: Sandbox, name: str, site: Site) -> None:
    """The cluster's QOS and accounts, as the site file names them; jobs that name no QOS get `QOS`."""
    qos = sorted(site.known_qos | {QOS})
    accounts = {account for partition in site.partitions.values() for account in partition.accounts or ()}
    manage(sandbox, "add", "cluster", name)
    for each in qos:
        manage(sandbox, "add", "qos", each)
        if (limit := time_limit_s(site.qos.get(each) or None)) is not None:
            manage(sandbox, "modify", "qos", each, "set", f"MaxWall={slurm_time(limit)}", "Flags=DenyOnLimit")
    owned = (f"cluster={name}", f"qos={','.join(qos)}", f"defaultqos={QOS}")
    named = ",".join(sorted(accounts | {ACCOUNT}))
    manage(sandbox, "add", "account", named, *owned)
    manage(sandbox, "add", "user", "root", f"account={named}", f"defaultaccount={ACCOUNT}", *owned)


def _empty_accounting(sandbox: Sandbox, name: str, site: Site) -> None:
    manage(sandbox, "delete", "cluster", name)
    for each in sorted(site.known_qos | {QOS}):
        manage(sandbox, "delete", "qos", each)


def write_files(sandbox: Sandbox, cluster: str, conf: str, home: Path, *, port: int = _PORT) -> Path:
    """slurm.conf, with the settings, nodes and partitions of ``conf``, and gres.conf; the path of slurm.conf.

    A setting of ``conf`` that is empty leaves out the one that such clusters have otherwise.
    """
    munge = Path(sandbox.root) / "munge/munge.socket"
    lines = _cloud_lines(conf)
    text = _SETTINGS.format(
        name=cluster, host=socket.gethostname(), address=CONTROLLER, munge=munge, port=port, home=home,
        dbd=ACCOUNTING_PORT,
    )  # fmt: skip
    overridden = {line.split("=")[0] for line in lines if "=" in line} - {"NodeName", "PartitionName"}
    settings = [line for line in text.splitlines() if line.split("=")[0] not in overridden]
    path = home / "slurm.conf"
    stated = [line for line in [*settings, *lines] if not line.endswith("=")]
    path.write_text("\n".join(stated) + "\n", encoding="utf-8")
    (home / "gres.conf").write_text("\n".join(_gres_lines(lines)) + "\n", encoding="utf-8")
    return path


@contextmanager
def nodeless(sandbox: Sandbox, name: str, site: Site, home: Path) -> Iterator[Nodeless]:
    """The cluster ``name`` beside the sandbox, with the sandbox's munge and accounting."""
    cluster = re.sub(r"\W", "_", name)
    conf = write_files(sandbox, cluster, (CLUSTERS / f"{name}.conf").read_text("utf-8"), home)
    _fill_accounting(sandbox, cluster, site)
    try:
        with controller(conf) as running:
            yield running
    finally:
        _empty_accounting(sandbox, cluster, site)


@contextmanager
def like_site(sandbox: Sandbox, name: str, home: Path) -> Iterator[Nodeless]:
    """A slurmctld with the files that ``sandbox up --like NAME`` writes, beside the sandbox and without accounting."""
    munge = Path(sandbox.root) / "munge/munge.socket"
    places = {"SlurmctldPort": str(_PORT), "SlurmdPort": str(_PORT + 1), "AuthInfo": f"socket={munge}"}
    accounting = {"AccountingStorageType": "accounting_storage/none"}
    left_out = ("Host", "Port", "Pass", "Enforce")
    cloud = {"SuspendProgram": "/bin/true", "ResumeProgram": "/bin/true", "SuspendTime": "600", "PrivateData": "cloud"}
    # NoCtldInAddrAny would have it listen on the address of this host's name alone, which may be 127.0.0.1.
    listening = {"CommunicationParameters": ""}
    settings = {**places, **accounting, **cloud, **listening, **{f"AccountingStorage{key}": "" for key in left_out}}
    layout = resolve_layout(Shape(like=name, settings=settings), load_site(name))
    folder = Folder(home)
    (home / "ctld").mkdir()
    conf = home / "slurm.conf"
    here = f"SlurmctldHost={socket.gethostname()}({CONTROLLER})"
    text = slurm_conf(layout, folder).replace(" State=UNKNOWN", " State=CLOUD")
    conf.write_text(re.sub(r"SlurmctldHost=.*", here, text), encoding="utf-8")
    (home / "gres.conf").write_text(gres_conf(layout, folder), encoding="utf-8")
    with controller(conf) as running:
        yield running


@contextmanager
def controller(conf: Path) -> Iterator[Nodeless]:
    """A slurmctld of ``conf``, which answers."""
    program = shutil.which("slurmctld") or "/usr/sbin/slurmctld"
    with (conf.parent / "out").open("wb") as out:
        daemon = subprocess.Popen([program, "-D", "-f", str(conf)], stdout=out, stderr=out)
    running = Nodeless(conf)
    try:
        eventually(lambda: running.run("scontrol", "ping").returncode == 0, what="an answer of slurmctld")
        yield running
    finally:
        running.run("scancel", "--user=root")
        if daemon.poll() is None:  # sacctmgr removes no cluster with jobs that have not ended
            eventually(lambda: "DBD Agent queue size: 0" in running.run("sdiag").stdout, what="the accounting of all")
        daemon.terminate()
        daemon.wait(timeout=240)
