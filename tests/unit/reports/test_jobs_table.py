"""``report jobs``: columns, periods, clusters, narrow terminals, colours; without sacct no job is forgotten."""

from __future__ import annotations

import json
import re
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from commandline import ok, within
from sacct_rows import simulated_rows
from scripted_cluster import ScriptedCluster, read_table
from scripted_slurm import answer
from terminal import on_terminal

from hpcjobs.run.job_files import task_dir

ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


def test_columns_are_chosen_and_ordered_by_header_or_by_name(cluster: ScriptedCluster) -> None:
    cluster.account(simulated_rows(7, jobs=5))
    rows = read_table(ok("report", "jobs", "-a", "--columns", "state,JOB,mem_used_bytes,started,gpu").out, "STATE")
    assert list(rows[0]) == ["STATE", "JOB", "MEM_USED_BYTES", "STARTED", "GPU"]
    assert {row["JOB"] for row in rows} == {"500", "501", "502", "503", "504"}
    assert all(re.fullmatch(r"\d[\d.]*[BKMGT]", row["MEM_USED_BYTES"]) for row in rows)
    refused = within("report", "jobs", "--columns", "job,stat")
    assert refused.code != 0
    assert "--columns stat: no such column" in refused.err
    assert "state" in refused.err


def test_a_period_has_a_begin_and_an_end_as_spans_or_dates(cluster: ScriptedCluster) -> None:
    rows = simulated_rows(7)
    cluster.account(rows)
    middle = int(time.time()) - 4 * 86400
    date = datetime.fromtimestamp(middle).isoformat(timespec="seconds")
    first: dict[str, int] = {}
    for row in rows:
        if "." not in row["JobID"]:
            first[row["JobID"]] = int(row["Submit"])  # of the last attempt
    before = {job for job, submitted in first.items() if submitted < middle}
    assert 0 < len(before) < len(first)
    for until in (date, "4d"):
        printed = ok("report", "jobs", "-a", "--until", until, "--json").json
        assert {row["job_id"] for row in printed} == before
    for wrong in (("--until", "someday"), ("--since", "2d", "--until", "3d")):
        answer = within("report", "jobs", *wrong)
        assert answer.code != 0
        assert "--until" in answer.err


def test_jobs_of_several_clusters_with_one_id_are_several_jobs(cluster: ScriptedCluster) -> None:
    (row, *_) = simulated_rows(7, jobs=1)
    cluster.account([row | {"Cluster": name, "User": "ana"} for name in ("east", "west")])
    printed = ok("report", "jobs", "-a", "--all-clusters", "--columns", "cluster,job").out
    assert [one["CLUSTER"] for one in read_table(printed, "CLUSTER")] == ["east", "west"]
    sums = ok("report", "jobs", "-a", "--all-clusters", "--by", "cluster,user", "--json").json
    assert sorted((one["group"], one["jobs"]) for one in sums) == [("east,ana", 1), ("west,ana", 1)]
    assert within("report", "jobs", "--all-clusters", "--cluster", "east").code != 0
    one = ok("report", "jobs", "-a", "--cluster", "west", "--columns", "cluster,job").out
    assert {row["CLUSTER"] for row in read_table(one, "CLUSTER")} == {"east", "west"}  # the stand-in does not choose


def test_a_cluster_that_slurmdbd_does_not_have_is_no_cluster_without_jobs(cluster: ScriptedCluster) -> None:
    answer(cluster.folder, "sacctmgr", "printf 'east\\nwest\\n'")
    for arguments in (("--cluster", "eats"), ("--cluster", "west,eats", "--by", "user")):
        refused = within("report", "jobs", *arguments)
        assert refused.code != 0
        assert "--cluster eats: slurmdbd has no such cluster" in refused.err
        assert "did you mean 'east'" in refused.err
    assert ok("report", "jobs", "--cluster", "west").out == "no jobs\n"


def test_sums_by_two_groups_add_up_to_those_of_one(cluster: ScriptedCluster) -> None:
    cluster.account(simulated_rows(7))
    both = ok("report", "jobs", "-a", "--by", "user,state", "--json").json
    one = {row["group"]: row["cpu_h"] for row in ok("report", "jobs", "-a", "--by", "user", "--json").json}
    assert len(both) > len(one)
    for user, hours in one.items():
        assert sum(row["cpu_h"] for row in both if row["group"].startswith(f"{user},")) == pytest.approx(hours)
    assert within("report", "jobs", "--by", "user,user").code != 0


@pytest.mark.parametrize("columns", [80, 60])
def test_a_table_in_a_narrow_terminal_has_a_line_per_job_and_advice_below(
    cluster: ScriptedCluster, columns: int
) -> None:
    cluster.account(simulated_rows(7, jobs=12))
    lines = [
        ESCAPE.sub("", line).rstrip() for line in on_terminal("report", "jobs", "-a", columns=columns).out.split("\n")
    ]
    top = next(n for n, line in enumerate(lines) if line.startswith("JOB"))
    end = next(n for n, line in enumerate(lines) if n > top and not line)
    assert {"JOB", "STATE", "CPU", "MEM"} <= set(lines[top].split())
    assert len(lines[top + 2 : end]) == 12
    assert all(len(line) <= columns for line in lines[:end])
    assert re.search(r"5\d\d: .*--(mem|time|cpus)", " ".join(lines[end:]))


def test_efficiencies_and_states_have_colours_on_a_terminal_alone(cluster: ScriptedCluster) -> None:
    cluster.account(simulated_rows(7))
    on_screen = on_terminal("report", "jobs", "-a", columns=220).out
    colours = {code for code, share in re.findall(r"\x1b\[(\d+)m(\d+)%", on_screen) if int(share) >= 75}
    assert colours == {"32"}
    assert {code for code, share in re.findall(r"\x1b\[(\d+)m(\d+)%", on_screen) if int(share) < 25} == {"31"}
    assert "\x1b" not in ok("report", "jobs", "-a").out
    assert "\x1b[32m" not in on_terminal("report", "jobs", "-a", columns=220, NO_COLOR="1").out


def break_sacct(cluster: ScriptedCluster) -> None:
    (cluster.folder / "sacct").write_text("#!/bin/sh\necho 'slurmdbd is away' >&2; exit 1\n")


def write_state(run_dir: Path, task: str, **values: Any) -> None:
    now = time.time()
    state = {
        "job_id": f"100_{task}",
        "state": "COMPLETED",
        "started": now - 60,
        "ended": now - 30,
        "exit_code": 0,
        "nodes": "n1",
    }
    folder = task_dir(run_dir, f"100_{task}")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "state.json").write_text(json.dumps(state | values), encoding="utf-8")


def test_without_sacct_tasks_that_ended_are_listed_beside_one_that_is_in_the_queue(cluster: ScriptedCluster) -> None:
    ok("submit", "--array", "0-2", "true")
    (run_dir,) = Path("runs").glob("true-*")
    run_dir = run_dir.absolute()
    for task in ("0", "1"):
        write_state(run_dir, task)
    script = str(run_dir / "job.sh")
    cluster.queue([{"i": "100_2", "j": "true", "T": "RUNNING", "P": "gpu", "D": "1", "o": script, "u": "ana"}])
    break_sacct(cluster)
    answer = ok("report", "jobs", "-a", "--json")
    assert sorted(row["job_id"] for row in answer.json) == ["100_0", "100_1", "100_2"]
    assert "no accounting by sacct" in answer.err


def test_without_sacct_a_job_whose_folder_has_nothing_is_listed_as_unknown(cluster: ScriptedCluster) -> None:
    ok("submit", "--name", "lost", "true")
    break_sacct(cluster)
    (row,) = ok("report", "jobs", "-a", "--json").json
    assert (row["job_id"], row["name"], row["state"], row["source"]) == ("100", "lost", "UNKNOWN", "index")


def test_a_report_of_nobody_loads_no_table_library(cluster: ScriptedCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    from commandline import hpcjobs

    loaded = hpcjobs("report", "jobs", "--site", "local", env={"PYTHONPROFILEIMPORTTIME": "1"})
    assert loaded.out == "no jobs\n"
    assert "polars" not in loaded.err
