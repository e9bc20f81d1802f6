"""For every verb a command line whose output is recorded, on the sample cluster."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import NamedTuple
from unittest.mock import MagicMock

import pytest
from sample_cluster import NOW, SampleCluster

Prepare = Callable[[SampleCluster, pytest.MonkeyPatch], None]


def _nothing(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    """The jobs of the cluster are enough."""


class Case(NamedTuple):
    """One command line; ``fits``: no line is wider than the terminal, which only tables promise."""

    name: str
    arguments: tuple[str, ...]
    verb: str
    prepare: Prepare = _nothing
    fits: bool = False


def _case(
    line: str, *, name: str | None = None, verb: str | None = None, prepare: Prepare = _nothing, fits: bool = False
) -> Case:
    arguments = tuple(line.split())
    verb = verb or arguments[0]
    return Case(name or verb.replace(" ", "_"), arguments, verb, prepare, fits)


def sweep(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    cluster.sweep()
    patch.setattr("hpcjobs.sweeps.results_page.write", lambda *_, **__: None)


def samples(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    cluster.samples("42")
    patch.setattr("hpcjobs.jobstats.pages.write_load", lambda *_, **__: None)


def study(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    cluster.study()
    patch.setattr("hpcjobs.scaling.page.write", lambda *_, **__: None)  # pictures take seconds


def drill(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    from hpcjobs.run.drill import DrillVerdict

    verdict = DrillVerdict(
        "kill-rank", "rank 1 on n2 was killed", "mine", "51", True, (), 2, 100, 37, 3, 12.0, 100, 0.0,
        str(cluster.here / "runs" / "drill"),
    )  # fmt: skip
    patch.setattr("hpcjobs.run.drill.drill", lambda *_, **__: verdict)


def _login_host(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    """One that answers; tests/cluster/remote has a real one."""
    patch.setenv("HPCJOBS_REMOTE", "login.example")
    answer = {"entry": {"run_dir": "/home/you/hpcjobs-code/mine/runs/train-47"}}
    patch.setattr("hpcjobs.remote.laptop.Laptop", MagicMock())
    patch.setattr("hpcjobs.jupyter.laptop.SharedRemote", lambda _: SimpleNamespace(ask=lambda _: answer))


def bad_node(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    cluster.bad_node()


def fabric(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    from hpcjobs.record.fabric import FabricPoint, FabricReport, NodeReport

    node = NodeReport("n1", "good", (), 1.0, "10.0.0.1", 1e12, 1e11, 1e10, 1e-5)
    report = FabricReport(1, NOW, 31.5, "47", (node,), None, {"cpu": (FabricPoint(1024, 1e-4),)}, ("alone",))
    patch.setattr("hpcjobs.cli.fabric._run", lambda *_, **__: 0)
    patch.setattr("hpcjobs.cli.fabric.read_report", lambda _: report)


def image(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    from hpcjobs.containers.build import BuiltImage
    from hpcjobs.containers.images import Image, ImageFacts, ImageManifest
    from hpcjobs.containers.look import ImageFinding, ImageVerdict

    facts = ImageFacts(python="3.11", torch="2.9.0")
    manifest = ImageManifest(1, "pytorch", "pytorch.def", "ab", {}, "docker://debian:12", None, "n1", NOW, 120.0,
                             "1.3.4", 1 << 30, "cd", "ef", facts)  # fmt: skip
    verdict = ImageVerdict(
        image="x.sif", site="mine", facts=facts, findings=(ImageFinding("warning", "mpi", "no MPI"),)
    )
    patch.setattr("hpcjobs.containers.build.build", lambda *_, **__: BuiltImage(cluster.here / "x.sif", manifest, True))
    patch.setattr("hpcjobs.containers.images.find", lambda *_, **__: Image("x", "x.sif", None, facts))
    patch.setattr("hpcjobs.containers.look.check", lambda *_: verdict)
    patch.setattr("hpcjobs.containers.images.known", lambda _: {"x": "/images/x.sif"})
    patch.setattr("hpcjobs.containers.images.read_manifest", lambda _: manifest)


def session(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    from hpcjobs.jupyter.session import Session
    from hpcjobs.node.session.files import Connection, Settings
    from hpcjobs.run.index import entries
    from hpcjobs.scheduler.base import JobRecord, State

    entry = next(entry for entry in entries() if entry.job_id == "44")
    settings = Settings("lab", "/home/anna", True, "anna@login", "anna", ["python3"], "srun", None,
                        None, 7200.0, 300.0, None, [], False, {})  # fmt: skip
    connection = Connection(2, "44", "lab", "n6", "/tmp/hpcjobs-ab/cd", None, "secret", "/lab", "python3", NOW - 1200,
                            NOW + 6000)  # fmt: skip
    running = Session(entry, JobRecord("44", State.RUNNING, "squeue", node_list="n6"), settings, connection)
    patch.setattr("hpcjobs.jupyter.session.start", lambda _: entry)
    patch.setattr("hpcjobs.jupyter.session.find", lambda *_, **__: entry)
    patch.setattr("hpcjobs.jupyter.session.await_answer", lambda *_, **__: running)
    patch.setattr("hpcjobs.jupyter.session.sessions", lambda **_: [running])


def _as_root(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(os, "geteuid", lambda: 0)


def sandbox_up(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    from hpcjobs.sandbox import Host, Sandbox, Shape
    from hpcjobs.site.models import NodeShape

    host = Host(name="n1", address="10.9.0.1", shape=NodeShape(cpus=8, mem="8G"))
    built = Sandbox(root="/sandbox", site="sandbox", slurm_conf="/sandbox/etc/slurm.conf", shape=Shape(), hosts=(host,),
                    partitions={"cpu": ("n1",)})  # fmt: skip
    patch.setattr("hpcjobs.sandbox.up", lambda *_, **__: built)


def _sizes(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    """Sizes that do not change with our templates."""
    patch.setattr("hpcjobs.run.archive._sizes", lambda _: [20_000])


def _project_site(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    (cluster.here / "site_configs" / "ours.yaml").write_text("{description: ours, setup: ulimit -n 4096}\n")


def _shipped_site(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    """One shipped site, in a folder whose name has the same length in each checkout."""
    folder = cluster.here / "shipped"
    folder.mkdir()
    (folder / "local.yaml").write_text("{description: 'this machine, no Slurm', scheduler: local}\n")
    patch.setattr("hpcjobs.site.search.data_folder", lambda _: folder)


def _installation(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    from hpcjobs.discovery.installation import InstallationFinding

    findings = (InstallationFinding("hpcjobs", "", "0.1.0"), InstallationFinding("Slurm", "wrong", "no scontrol"))
    patch.setattr("hpcjobs.discovery.installation.examine", lambda *_, **__: iter(findings))


def no_wheel(cluster: SampleCluster, patch: pytest.MonkeyPatch) -> None:
    """Building the wheel takes seconds."""
    for module in ("render", "lifecycle"):
        patch.setattr(f"hpcjobs.cloud.{module}.wheel_of", lambda *_: None)


CASES = (
    _case("submit -N 2 train.py --lr 0.1"),
    _case("submit --dry-run -N 2 train.py", name="submit_dry_run"),
    _case("submit --explain -N 2 --env A=1 train.py", name="submit_explain", fits=True),
    _case("submit -N auto -t 10h --dry-run train.py", name="submit_auto"),
    _case("submit --test-only train.py", name="submit_test_only", fits=True),
    _case("submit -N 9 train.py", name="submit_refused"),
    _case("init -N 2 -t 1h train.py --lr 0.1"),
    _case("ps", fits=True),
    _case("ps --tasks", name="ps_tasks", fits=True),
    _case("ps --name nobody", name="ps_none"),
    _case("show 41"),
    _case("show 42", name="show_failed"),
    _case("show 44", name="show_running"),
    _case("logs 42"),
    _case("logs --rank 7 42", name="logs_none"),
    _case("monitor 41"),
    _case("completion bash"),
    _case("doctor", prepare=_installation),
    _case("skill --schema nodes"),
    _case("help topics", verb="help"),
    _case("why 42"),
    _case("why 45", name="why_pending"),
    _case("why 41", name="why_completed"),
    _case("diff 41 42"),
    _case("where --site mine -N 2 train.py", fits=True),
    _case("where --site mine -N 9 train.py", name="where_nowhere", fits=True),
    _case("rerun 41 --time 2h"),
    _case("wait 41"),
    _case("wait 42", name="wait_failed"),
    _case("wait 44 --timeout 0", name="wait_timeout"),
    _case("cancel 41 44"),
    _case("cancel", name="cancel_nothing"),
    _case("alloc --dry-run"),
    _case("shell 41"),
    _case("exec 41 true"),
    _case("hold 45"),
    _case("release 45"),
    _case("requeue 44"),
    _case("update 45 time=2h"),
    _case("prune --older-than 30m", prepare=_sizes),
    _case("archive 41"),
    _case("archive 44", name="archive_running"),
    *(_case(f"drill {fault}", verb=f"drill {fault}", prepare=drill)
      for fault in ("timeout", "preempt", "kill-rank", "kill-node", "full-disk")),
    _case("sweep run --set lr=1,2 --name grid train.py", verb="sweep run"),
    _case("sweep run --set lr=1,2 --name grid --dry-run train.py", name="sweep_dry_run", verb="sweep run"),
    _case("sweep status lr", verb="sweep status", prepare=sweep),
    _case("sweep resume lr", verb="sweep resume", prepare=sweep),
    _case("sweep results lr", verb="sweep results", prepare=sweep, fits=True),
    _case("sweep results lr --min loss", name="sweep_best", verb="sweep results", prepare=sweep, fits=True),
    _case("sweep cancel lr", verb="sweep cancel", prepare=sweep),
    _case("scale -N 1,2 --repeats 1 --name speed train.py"),
    _case("scale --name a/b train.py", name="scale_name"),
    _case("jupyter --dry-run"),
    _case("jupyter --detach", name="jupyter_detach", prepare=session),
    _case("jupyter list", verb="jupyter list", prepare=session, fits=True),
    _case("jupyter open", verb="jupyter open"),
    _case("jupyter stop --all", verb="jupyter stop"),
    _case("report jobs", verb="report jobs", fits=True),
    _case("report jobs --by state", name="report_jobs_by", verb="report jobs", fits=True),
    _case("report scaling speed", verb="report scaling", prepare=study),
    _case("report load 42", verb="report load", prepare=samples),
    _case("report sweep lr", verb="report sweep", prepare=sweep),
    _case("report advise 41 43_0", verb="report advise"),
    _case("fetch 47", prepare=_login_host),
    _case("fabric --dry-run"),
    _case("fabric build --dry-run", verb="fabric build"),
    _case("nodes", prepare=bad_node, fits=True),
    _case("container build pytorch", verb="container build", prepare=image),
    _case("container build --dry-run pytorch", name="container_build_dry_run", verb="container build"),
    _case("container list", verb="container list"),
    _case("container list", name="container_list_image", verb="container list", prepare=image, fits=True),
    _case("container check x.sif", verb="container check", prepare=image),
    _case("container check nothing", name="container_check_nothing", verb="container check"),
    _case("sites", prepare=_shipped_site, fits=True),
    _case("sites show mine", verb="sites show"),
    _case("sites trust", verb="sites trust", prepare=_project_site),
    _case("sites check mine", verb="sites check"),
    _case("sites init --dry-run", verb="sites init"),
    _case("sites schema", verb="sites schema"),
    _case("cloud render --site gcp-t4 --out rented", verb="cloud render", prepare=no_wheel),
    _case("cloud check --site gcp-t4", verb="cloud check", prepare=no_wheel),
    _case("cloud plan --site gcp-t4", verb="cloud plan", prepare=no_wheel),
    _case("cloud up --site gcp-t4", verb="cloud up", prepare=no_wheel),
    _case("cloud down --site gcp-t4", verb="cloud down", prepare=no_wheel),
    _case("sandbox up", verb="sandbox up", prepare=sandbox_up),
    _case("sandbox status", verb="sandbox status"),
    _case("sandbox down", verb="sandbox down", prepare=_as_root),
    _case("sandbox add-user nobody", verb="sandbox add-user"),
    _case("sandbox env", verb="sandbox env"),
)  # fmt: skip
