"""``hpcjobs sites check`` on clusters whose answers were recorded, changed after the site file was written."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from commandline import await_answer, hpcjobs, ok, start, within
from recorded import put_login_node_on_path, put_on_path
from scripted_slurm import answer
from slurm_rows import accounted_row, print_rows, queued_row

PARTITIONS = "scontrol --all --oneliner show partition"
NODES = "scontrol --all --oneliner show node"
CONFIG = "scontrol show config"


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of PATH for the cluster's commands; its login shell has Lmod with some modules."""
    modules = "\\nhpcjobs-modules /apps/lmod/lmod|/apps/lmod\\nopenmpi/4.1.6\\ncuda/12.4\\n"
    return put_login_node_on_path(tmp_path / "slurm", monkeypatch, modules=modules)


def written(cluster: str, commands: Path, **changes: Any) -> None:
    """The file that ``sites init`` writes of ``cluster``, with ``changes``."""
    put_on_path(commands, cluster)
    site = ok("sites", "init", "mine", "--dry-run", "--json", "--module", "openmpi").json["site"]
    folder = Path.home() / ".config" / "hpcjobs" / "site_configs"
    folder.mkdir(parents=True)
    (folder / "mine.yaml").write_text(yaml.safe_dump(site | changes))


def wrong(code: int = 1) -> dict[str, tuple[str, str]]:
    """What is wrong now: by its key, what it says and what to change."""
    done = within("sites", "check", "mine", "--json")
    assert done.code == code, done
    return {f["subject"]: (f["text"], f["change"]) for f in done.json["findings"] if f["verdict"] == "wrong"}


@pytest.mark.parametrize("cluster", ["cpu", "gpus", "bare"])
def test_a_file_that_was_just_written_agrees_with_its_cluster(cluster: str, commands: Path) -> None:
    written(cluster, commands)
    assert wrong(0) == {}
    table = ok("sites", "check", "mine").out
    assert "module avail has openmpi" in table


def test_what_has_changed_under_the_file_is_named_with_what_to_write(commands: Path) -> None:
    written("cpu", commands)
    put_on_path(
        commands,
        "cpu",
        changes={PARTITIONS: ("PartitionName=long", "PartitionName=verylong"), CONFIG: ("= tu_hpc", "= other")},
    )
    answer(commands, "bash", "printf '\\nhpcjobs-modules /apps/lmod/lmod|/apps/lmod\\nopenmpi5/5.0\\n'")
    findings = wrong()
    assert findings["cluster"] == ("is tu_hpc; ClusterName here is other", "cluster: other")
    assert findings["partitions.long"][0].startswith("the cluster has no partition long; did you mean 'verylong'?")
    assert findings["modules"][0].startswith("module avail has no openmpi; did you mean 'openmpi5/5.0'?")


def test_a_longer_limit_than_the_clusters_and_an_unknown_mpi_type_qos_and_account_are_wrong(commands: Path) -> None:
    written("cpu", commands, mpi="pmi9", qos={"normal": "9-0", "gone": ""}, defaults={"time": "1h", "account": "x"})
    findings = wrong()
    assert findings["mpi"][0].startswith("srun --mpi=list has no pmi9; it has ")
    assert findings["qos.gone"][0].startswith("there is no such QOS; ")
    assert findings["qos.normal"] == ("is 9-0; MaxWall is 2-00:00:00", "normal: 2-00:00:00")
    assert findings["defaults.account"][0].startswith("is x, which is no account of yours; you have ")


def test_nodes_that_are_fewer_or_smaller_and_gpus_of_another_name_are_wrong(commands: Path) -> None:
    written("gpus", commands)
    path = Path.home() / ".config" / "hpcjobs" / "site_configs" / "mine.yaml"
    site = yaml.safe_load(path.read_text())
    name, partition = next((n, p) for n, p in site["partitions"].items() if "gpus" in p.get("node", {}))
    model = partition["node"]["gpu_model"]
    for changed, text in (
        ({"nodes": 999}, "999 nodes of "),
        ({"node": partition["node"] | {"cpus": 4096}}, "no node has 4096 CPUs"),
        ({"node": partition["node"] | {"gpu_model": "other"}}, f"the GRES of its nodes are called {model}"),
    ):
        path.write_text(yaml.safe_dump(site | {"partitions": {name: partition | changed}}))
        done = within("sites", "check", "mine", "--json")
        texts = [f["text"] for f in done.json["findings"] if f["verdict"] == "wrong"]
        assert any(text in shown for shown in texts), (changed, texts)


def test_a_local_site_has_nothing_to_compare(here: Path) -> None:
    done = within("sites", "check", "local")
    assert done.code == 5
    assert "has no Slurm to compare it with" in done.err


def test_a_partition_whose_nodes_are_all_drained_is_wrong_with_the_reason(
    commands: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written("gpus", commands)
    monkeypatch.setenv("TZ", "UTC")
    drained = ("State=IDLE", "State=IDLE+DRAIN Reason=broken fan [root@1795341600]")
    put_on_path(commands, "gpus", changes={NODES: drained})
    findings = {subject: text for subject, (text, _) in wrong().items()}
    text = findings["partitions.gpu"]
    assert text.startswith("2 of 2 nodes start no job: gpus01 IDLE+DRAIN (broken fan [root@2026-11-22T10:00:00])")


def test_licences_of_the_cluster_are_written_and_compared(commands: Path) -> None:
    written("cpu", commands)
    path = Path.home() / ".config" / "hpcjobs" / "site_configs" / "mine.yaml"
    real = (commands / "scontrol").read_text()
    shown = "echo 'LicenseName=matlab Total=10 Used=0 Free=10 Reserved=0 Remote=no'"
    (commands / "scontrol").write_text(
        real.replace("case ", f'case "$*" in *licenses*) {shown}; exit;; esac\ncase ', 1)
    )
    assert yaml.safe_load(ok("sites", "init", "mine", "--dry-run").out)["licenses"] == {"matlab": 10}
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | {"licenses": {"matlab": 20, "fluent": 1}}))
    findings = wrong()
    assert findings["licenses.matlab"] == ("is 20; Slurm has 10", "matlab: 10")
    assert findings["licenses.fluent"][0].startswith("Slurm has no such licence; ")


def test_what_only_a_job_can_tell_is_named_as_not_looked_at(commands: Path) -> None:
    written("gpus", commands, interface="ib0", launchers=["srun", "mpirun"])
    notes = {
        (f["subject"], f["text"].partition(":")[0])
        for f in ok("sites", "check", "mine", "--json").json["findings"]
        if "`sites check --run`" in f["text"]
    }
    assert {("interface", "ib0"), ("launchers", "mpirun")} <= notes
    assert "gpu_request" in {subject for subject, _ in notes}


_ROWS = """\
n=40
while read -r line; do
    n=$((n + 1))
    {row}
done <{folder}/sbatch.asked
"""
_NOW = "$(date +%s)"


def queue_jobs(commands: Path) -> None:
    """sbatch takes every job, from number 41 on; each of them waits in the queue."""
    answer(commands, "sbatch", f"echo $((40 + $(wc -l <{commands}/sbatch.asked)))")
    job = {"JobID": "$n", "JobName": "sites-check", "State": "PENDING", "Reason": "Resources", "Partition": "any"}
    row = queued_row(**job, Submit=_NOW, TimeLimit="5:00", Command="${line##* }")
    answer(commands, "squeue", _ROWS.format(row=print_rows(row), folder=commands))
    answer(commands, "scancel", ":")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_check_that_is_interrupted_cancels_its_trial_jobs(commands: Path, number: signal.Signals) -> None:
    written("cpu", commands, node_local=[])
    queue_jobs(commands)
    check = start("sites", "check", "mine", "--run")
    assert check.stderr is not None
    first = check.stderr.readline()
    assert "jobs submitted to site mine; waiting" in first
    check.send_signal(number)
    answered = await_answer(check, timeout_s=100)
    assert answered.code == 128 + number, answered
    ids = [str(41 + index) for index in range(int(first.split()[1]))]
    assert (commands / "scancel.asked").read_text() == f"--quiet {' '.join(ids)}\n"
    assert f"cancelled the trial jobs {' '.join(ids)}" in answered.err


def test_all_trial_jobs_share_one_timeout(commands: Path) -> None:
    written("cpu", commands, node_local=[])
    queue_jobs(commands)
    began = time.monotonic()
    done = hpcjobs("sites", "check", "mine", "--run", "--timeout", "8s", "--json")
    passed_s = time.monotonic() - began
    late = [f for f in done.json["findings"] if "had not ended in time: Resources" in f["text"]]
    assert len(late) > 2, done
    assert 8 <= passed_s < 8 * len(late), passed_s


def test_a_trial_job_that_the_cluster_moved_to_another_partition_says_nothing_of_its_own(commands: Path) -> None:
    written("cpu", commands, node_local=[])
    queue_jobs(commands)
    answer(commands, "squeue", ":")
    row = accounted_row(JobID="$n", JobName="sites-check", Partition="long", NodeList="tu01", Submit=_NOW)
    answer(commands, "sacct", _ROWS.format(row=print_rows(row), folder=commands))
    done = hpcjobs("sites", "check", "mine", "--run", "--json")
    findings = {f["subject"]: (f["verdict"], f["text"]) for f in done.json["findings"]}
    verdict, text = findings["job in short by the default launcher"]
    assert verdict == "note"
    assert text.endswith("ran in long: the cluster moved it, so short was not tried")
    assert findings["job in long by the default launcher"][0] == "ok"


@pytest.mark.parametrize(("cluster", "gpu"), [("gpus", "a"), ("cpu", "no")])
def test_a_trial_job_names_no_partition_where_a_plugin_of_the_cluster_chooses_it(
    cluster: str, gpu: str, commands: Path
) -> None:
    written(cluster, commands, node_local=[], chooses_partition=True)
    answer(commands, "sbatch", f"echo $((40 + $(wc -l <{commands}/sbatch.asked)))")
    answer(commands, "squeue", ":")
    row = accounted_row(JobID="$n", JobName="sites-check", Partition="chosen", NodeList="tu01", Submit=_NOW)
    answer(commands, "sacct", _ROWS.format(row=print_rows(row), folder=commands))
    done = hpcjobs("sites", "check", "mine", "--run", "--json")
    trials = {f["subject"]: f["text"] for f in done.json["findings"] if f["subject"].startswith("job ")}
    subject = f"job with {gpu} GPU and no partition named by the default launcher"
    assert trials == {subject: "job 41 ran in chosen"}
    (line,) = (commands / "sbatch.asked").read_text().splitlines()
    assert "--partition" not in line + Path(line.split()[-1]).read_text()
