"""Requests as users of thirteen public clusters write them, for plain sbatch and for hpcjobs: the effect is the same.

Each file of tests/data/public_clusters has a cluster as its public user guide describes it, and four requests that were
written before they were tried. The nodes are cloud nodes that never start; an ordinary user submits.
"""

from __future__ import annotations

import os
import pwd
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from commandline import Answer
from nodeless import Nodeless, controller, manage, write_files
from shared import shared_folder
from waiting import eventually

from hpcjobs import sandbox as sandboxes
from hpcjobs.sandbox import Sandbox, Shape

CLUSTERS = Path(__file__).resolve().parents[2] / "data" / "public_clusters"
NAMES = sorted(path.stem for path in CLUSTERS.glob("*.yaml"))
SHORT = ("account-per-partition", "colons", "routes-by-size")
"""Of the thirteen, those that every run tries."""
USER = "visitor"
LATER = "now+1day"
PORT = 17830
EFFECT = (
    *("Partition", "Account", "QOS", "NumNodes", "NumTasks", "NumCPUs", "CPUs/Task", "TimeLimit", "TRES", "Features"),
    *("MinMemoryNode", "MinMemoryCPU", "OverSubscribe", "ArrayTaskId", "ArrayTaskThrottle", "Licenses", "Reservation"),
)
"""What scontrol shows of a job that is the same whoever submits it."""


@dataclass(frozen=True)
class Request:
    """A request as it is written for sbatch, and for hpcjobs."""

    wants: str
    sbatch: str
    submit: str
    mend: str | None = None
    """What a refusal names that makes the request right."""
    says: str | None = None
    """What hpcjobs says beside the job's id."""
    only_hpcjobs_refuses: bool = False
    differs: tuple[str, ...] = ()
    """What is meant to be different, for a reason that stands in the file."""

    @property
    def is_refused(self) -> bool:
        return self.mend is not None


@pytest.fixture(scope="module")
def sandbox() -> Iterator[Sandbox]:
    """It brings munge and slurmdbd."""
    # An /etc of our own: see tools/elsewhere.
    subprocess.run(["useradd", "--no-create-home", "--home-dir", "/var/lib", "--shell", "/bin/bash", USER], check=True)
    try:
        yield sandboxes.up(Shape(nodes=1, cpus_per_node=1))
    finally:
        sandboxes.down()


@dataclass(frozen=True)
class Visitor:
    """An ordinary user on the login node of a cluster."""

    folder: Path
    cluster: Nodeless

    def run(self, *command: str, reads_all: bool = False) -> Answer:
        user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--clear-groups"]
        if reads_all:  # this Python can lie in root's home
            user += ["--inh-caps=+dac_read_search", "--ambient-caps=+dac_read_search"]
        own = {"HOME": str(self.folder), "USER": USER, "SLURM_CONF": self.cluster.env["SLURM_CONF"]}
        unset = ("SLURM_", "SBATCH_", "XDG_", "HPCJOBS_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(unset)} | own
        done = subprocess.run([*user, *command], cwd=self.folder, env=env, capture_output=True, text=True, check=False)
        return Answer(done.returncode, done.stdout, done.stderr)

    def hpcjobs(self, *arguments: str) -> Answer:
        return self.run(sys.executable, "-m", "hpcjobs", *arguments, reads_all=True)

    def effect(self, job_id: str, where: Sequence[str] = ()) -> dict[str, str]:
        shown = self.run("scontrol", *where, "--oneliner", "show", "job", job_id)
        assert shown.code == 0, shown
        job = dict(part.split("=", 1) for part in shown.out.splitlines()[0].split() if "=" in part)
        # -N 2 is shown as 2-2, and -n 8 as 1.
        return {key: job[key].partition("-")[0] if key == "NumNodes" else job[key] for key in EFFECT if key in job}


def add_qos(sandbox: Sandbox, accounting: dict[str, Any]) -> None:
    for name in accounting.get("qos", {}):
        manage(sandbox, "add", "qos", name)
    for name, limits in {**accounting.get("qos", {}), **accounting.get("change", {})}.items():
        if limits:
            manage(sandbox, "modify", "qos", name, "set", *limits.split(), "Flags=DenyOnLimit")


def fill_accounting(sandbox: Sandbox, cluster: str, associations: Sequence[dict[str, Any]]) -> None:
    manage(sandbox, "add", "cluster", cluster)
    for account in dict.fromkeys(association["account"] for association in associations):
        manage(sandbox, "add", "account", account, f"cluster={cluster}")
    for association in associations:
        charged = [f"account={association['account']}", f"cluster={cluster}"]
        only = [f"partition={association['partition']}"] if "partition" in association else []
        qos = [f"qos={','.join(association['qos'])}", f"defaultqos={association['default_qos']}"]
        manage(sandbox, "add", "user", USER, *charged, *only, *qos)


def empty_accounting(sandbox: Sandbox, clusters: Sequence[str], accounting: dict[str, Any]) -> None:
    for cluster in clusters:
        manage(sandbox, "delete", "cluster", cluster)
    for qos in accounting.get("qos", {}):
        manage(sandbox, "delete", "qos", qos)
    for qos in accounting.get("change", {}):
        manage(sandbox, "modify", "qos", qos, "set", "MaxWall=-1", "Flags=-1")


@contextmanager
def public_cluster(sandbox: Sandbox, name: str, described: dict[str, Any], home: Path) -> Iterator[Nodeless]:
    """The cluster with its own controller; a federation has another one."""
    confs = {name.replace("-", "_"): described["conf"]}
    if "sibling" in described:
        confs[described["federated_with"]] = described["sibling"]
    accounting = described["accounting"]
    settings = "".join(f"{key}={value}\n" for key, value in described.get("settings", {}).items())
    with ExitStack() as stack:
        stack.callback(empty_accounting, sandbox, list(confs), accounting)
        running = []
        add_qos(sandbox, accounting)
        for at, (cluster, conf) in enumerate(confs.items()):
            place = home / cluster
            place.mkdir()
            fill_accounting(sandbox, cluster, accounting["associations"])
            if "lua" in described:
                (place / "job_submit.lua").write_text(described["lua"], encoding="utf-8")
            path = write_files(sandbox, cluster, settings + conf, place, port=PORT + 2 * at)
            running.append(stack.enter_context(controller(path)))
            stack.callback(running[-1].run, "scancel", f"--user={USER}")
        if len(confs) > 1:
            manage(sandbox, "add", "federation", "both", f"clusters={','.join(confs)}")
            stack.callback(manage, sandbox, "delete", "federation", "both")
            eventually(lambda: "Sibling" in running[0].run("scontrol", "show", "federation").stdout)
        yield running[0]


def try_request(visitor: Visitor, request: Request) -> str:
    """``equal``, ``refused with the line that mends it``, or what is wrong."""
    plain = shlex.split(request.sbatch)
    (visitor.folder / "job.sh").write_text("#!/bin/bash\nsrun python3 train.py\n", encoding="utf-8")
    by_sbatch = visitor.run("sbatch", "--parsable", f"--begin={LATER}", *plain, "job.sh")
    ours = ("submit", "--json", "-o", f"begin={LATER}", *shlex.split(request.submit), "python3", "train.py")
    answer = visitor.hpcjobs(*ours)
    refused_by_sbatch = by_sbatch.code != 0
    if refused_by_sbatch != (request.is_refused and not request.only_hpcjobs_refuses):
        return f"the request was written wrongly: {by_sbatch}"
    if answer.code != 0:
        if not request.is_refused:
            return f"refused wrongly: {answer.err}"
        return "refused with the line that mends it" if request.mend in answer.err else f"no mend: {answer.err}"
    if request.is_refused:
        return "accepted wrongly"
    if request.says is not None and request.says not in answer.err:
        return f"does not say {request.says!r}: {answer.err}"
    expected, got = visitor.effect(by_sbatch.out.strip().split(";")[0]), visitor.effect(answer.json["job_id"])
    different = {key: (expected.get(key), got.get(key)) for key in EFFECT if expected.get(key) != got.get(key)}
    if different and set(different) <= set(request.differs):  # versions of Slurm print TRES differently
        return "different as documented"
    return f"different (sbatch, hpcjobs): {different}; {answer.err}" if different else "equal"


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in SHORT else [pytest.mark.long]) for n in NAMES])
def test_a_request_has_the_effect_that_it_has_with_plain_sbatch(sandbox: Sandbox, name: str) -> None:
    described = yaml.safe_load((CLUSTERS / f"{name}.yaml").read_text("utf-8"))
    with shared_folder() as home, public_cluster(sandbox, name, described, home) as cluster:
        entry = pwd.getpwnam(USER)
        folder = home / "user"
        folder.mkdir()
        home.chmod(0o755)
        (folder / "train.py").write_text("print('trained')\n", encoding="utf-8")
        for path in (folder, *folder.iterdir()):
            os.chown(path, entry.pw_uid, entry.pw_gid)
        visitor = Visitor(folder, cluster)
        init = visitor.hpcjobs("sites", "init")
        assert init.code == 0, init
        results = {r["wants"]: try_request(visitor, Request(**r)) for r in described["requests"]}
    right = ("equal", "different as documented", "refused with the line that mends it")
    print(name, *(f"  {wants}: {result}" for wants, result in results.items()), sep="\n")
    assert not {wants: result for wants, result in results.items() if result not in right}
