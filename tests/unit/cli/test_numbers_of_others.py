"""No number, text or list in Slurm's answers and in files of a job ends a verb by an error that nobody foresaw."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commandline import ok, within
from sample_cluster import SampleCluster

from hpcjobs.run.progress import describe_sample, find_alarms, newest_samples

_VERBS = ("ps", "ps -a", "show 42", "show 43", "show 43 --json", "show 45", "show 46", "why 42", "why 45", "why 46",
          "logs 44", "wait 44 --timeout 0", "report jobs", "report jobs --json", "report advise 42")  # fmt: skip
_NUMBERS = {
    "squeue": ("D", "V", "S", "M", "l", "Q", "L"),
    "sacct": ("Submit", "Eligible", "Start", "End", "ElapsedRaw", "TimelimitRaw", "NNodes", "NTasks", "NCPUS", "ReqMem",
              "AllocTRES", "TotalCPU", "MaxRSS", "AveRSS", "ConsumedEnergyRaw", "ExitCode"),
}  # fmt: skip
_SHOWN = (
    "NumNodes",
    "SubmitTime",
    "StartTime",
    "EndTime",
    "RunTime",
    "TimeLimit",
    "Restarts",
    "ExitCode",
    "ArrayTaskId",
)


def _change(cluster: SampleCluster, command: str, values: dict[str, str]) -> None:
    header, *lines = (cluster.commands / f"{command}.table").read_text().splitlines()
    rows = [dict(zip(header.split("|"), line.split("|"), strict=True)) for line in lines]
    cluster.table(command, [{**row, **values} for row in rows])


def _without_accounting(cluster: SampleCluster) -> None:
    cluster.command("sacct", "echo 'Slurm accounting storage is disabled' >&2; exit 1")


def _each_verb(cluster: SampleCluster) -> None:
    for verb in _VERBS:
        answer = within(*verb.split())
        assert answer.code != 70, (verb, answer)


@pytest.mark.parametrize("number", ["9" * 18, "9" * 23, "9" * 5000, "²"], ids=["18", "23", "5000", "raised"])
@pytest.mark.parametrize("has_accounting", [True, False])
def test_a_number_of_slurm_that_cannot_be_stops_no_verb(
    cluster: SampleCluster, number: str, has_accounting: bool
) -> None:
    forms = {
        "M": f"{number}-00:00:00",
        "l": f"{number}:00:00",
        "L": f"{number}:00",
        "TotalCPU": f"{number}:00:00",
        "ReqMem": f"{number}P",
        "AllocTRES": f"cpu={number},mem={number}P,gres/gpu={number}",
        "ExitCode": f"{number}:9",
    }
    for command, columns in _NUMBERS.items():
        if command == "sacct" and not has_accounting:
            _without_accounting(cluster)
        else:
            _change(cluster, command, {name: forms.get(name, number) for name in columns})
    shown = cluster.commands / "scontrol"
    shown.rename(cluster.commands / "plain-scontrol")
    changes = " ".join(f"-e 's|{name}=[^ ]*|{name}={number}|'" for name in _SHOWN)
    cluster.command("scontrol", f'"${{0%/*}}/plain-scontrol" "$@" | sed {changes}')
    _each_verb(cluster)


@pytest.mark.parametrize("name", ["started", "ended"])
def test_a_time_that_cannot_be_in_a_file_of_a_job_stops_no_verb(cluster: SampleCluster, name: str) -> None:
    times: dict[str, float] = {"started": 1.0, "ended": 2.0, name: 10**18 - 1}
    end = {"job_id": "42", "nodes": "n1", "exit_code": 1, **times}
    for folder in cluster.run_dirs.values():
        (folder / "state.json").write_text(json.dumps({**end, "state": "FAILED"}))
        attempt = {**end, "cause": "error", "steps": 5, "saved": 1, "decision": "requeued"}
        (folder / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    _each_verb(cluster)
    _without_accounting(cluster)
    _each_verb(cluster)


def test_a_time_of_slurm_that_cannot_be_is_not_known(cluster: SampleCluster) -> None:
    _change(cluster, "sacct", dict.fromkeys(("Submit", "Eligible", "Start", "End", "ElapsedRaw"), "9" * 18))
    names = ("submitted", "eligible", "started", "ended", "elapsed_s")
    rows = ok("report", "jobs", "42", "--json").json
    assert [[row[name] for name in names] for row in rows] == [[None] * len(names)]


def test_bytes_that_are_no_text_in_columns_for_people_stop_no_verb(cluster: SampleCluster) -> None:
    _change(cluster, "squeue", {"r": "reason@", "P": "gpu@", "N": "n1@"})
    (cluster.commands / "squeue").rename(cluster.commands / "plain-squeue")
    cluster.command("squeue", r'"${0%/*}/plain-squeue" "$@" | LC_ALL=C sed "s/@/\xe9/g"')
    _without_accounting(cluster)
    _each_verb(cluster)
    assert "reason?" in ok("report", "jobs", "--json").out


def test_a_list_of_hosts_that_is_none_is_one_name_as_it_is_printed(cluster: SampleCluster) -> None:
    hosts = "n[0-999999999999]"
    _change(cluster, "squeue", {"N": hosts})
    _change(cluster, "sacct", {"NodeList": hosts})
    _each_verb(cluster)
    for folder in cluster.run_dirs.values():
        state = {"job_id": "7", "state": "FAILED", "exit_code": 1, "started": 1, "ended": 2, "nodes": hosts}
        (folder / "state.json").write_text(json.dumps(state))
        for verb in ("why", "show", "logs"):
            answer = within(verb, str(folder))
            assert answer.code != 70, (verb, answer)
    refused = within("logs", str(cluster.run_dirs["42"]), "--node", "n7")
    assert "n7" in refused.err


def test_a_list_of_tasks_that_slurm_has_cut_is_an_error_with_a_hint(cluster: SampleCluster) -> None:
    _change(cluster, "squeue", {"i": "43_[1,3,...]"})
    for verb in _VERBS:
        answer = within(*verb.split())
        assert answer.code != 70, (verb, answer)
    answer = within("ps")
    assert "squeue printed the job '43_[1,3,...]'" in answer.err, answer
    assert "SLURM_BITSTR_LEN=0" in answer.err


@pytest.mark.parametrize("verb", ["show L1", "show L1 --json", "why L1"])
@pytest.mark.parametrize("number", ["1e999", "-1e999", "NaN", "1e300", "9" * 400, "9" * 5000])
def test_a_sample_of_impossible_numbers_is_none(here: Path, running: Path, number: str, verb: str) -> None:
    head = '{"kind": "monitor", "host": "n1", "started_at": 1, "interval_s": 5}'
    names = ("idle_s", "ended_s", "rss_bytes", "gpu_memory_bytes", "memory_limit_bytes", "gpu_percent", "cpu_percent")
    values = ", ".join(f'"{name}": {number}' for name in names)
    sample = f'{{"kind": "sample", "time_s": 1, "gpus": 1, "ranks": 1, "ended_ranks": [1], {values}}}'
    (running / "monitor.jsonl").write_text(f"{head}\n{sample}\n")
    (running / "monitor-1.jsonl").write_text(f"{head.replace('1,', f'{number},', 1)}\n{sample}\n")
    answer = within(*verb.split())
    assert answer.code == 0, answer
    nodes = newest_samples(running)  # as `top` reads them
    assert all(describe_sample(node.sample) == "" for node in nodes)
    assert find_alarms(nodes) == []


@pytest.fixture
def running(here: Path) -> Path:
    """The run folder of a local job that runs."""
    return Path(ok("submit", "--site", "local", "--json", "sleep", "600").json["run_dir"])


@pytest.mark.parametrize(
    "verb", ["sweep results lr --min loss", "sweep results lr --max loss", "sweep results lr", "report sweep lr"]
)
def test_a_result_that_no_float_holds_stops_no_comparison(cluster: SampleCluster, verb: str) -> None:
    cluster.sweep()
    summary, *_ = cluster.here.glob("runs/sweep-lr/cells/*/summary.json")
    summary.write_text(f'{{"schema": "hpcjobs.summary/1", "loss": 1{"0" * 400}}}')
    answer = within(*verb.split())
    assert answer.code == 0, answer
